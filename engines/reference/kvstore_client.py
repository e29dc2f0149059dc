"""A `BlockStore` over the node's kvstore: keys and leases over gRPC, the bytes in shared memory.

```
intake thread   lookup --AcquirePrefix--> views of the arena, leased
step thread     copies them into its pool --> verified --> release --> queue --+
                offer --> queue ------------------------------------------------+
worker thread   ReserveBlocks, copy into the arena, CommitBlocks, ReleaseLease <+
```

Losing the store is never an error: a late, failed or wrong answer is a miss, a full queue drops the offer, and both are
counted. Blocks are read where they lie, and their checksums compared after they were copied, so a lease that ran out, a
store that was restarted or a bit that fell over cannot change the text (invariant 11). Offers never wait; a lookup
waits at most `LOOKUP_TIMEOUT_S` and its patience. Reconnects by itself. Decision: docs/decisions/0052-engine-client.md.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import grpc
import numpy as np

from engines.block_arena import Bytes, MappedArena
from engines.block_writer import CHUNK_BLOCKS, BlockWriter, Chunk, StaleArena
from engines.reference.kv_cache import BlockArray, BlockShape, BlockSpace, CachedPrefix
from engines.reference.loaded_model import named_bytes
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc

LOOKUP_TIMEOUT_S = 0.020  # a prefix block saves about this much prefill on a small model; later is not worth it
READ_LEASE_MS = 10_000  # a request may wait this long for its place; later its blocks may be gone, which is a miss
WRITE_LEASE_MS = 5_000  # a chunk takes milliseconds; a killed engine holds its slots no longer than this
WORKER_TIMEOUT_S = 1.0  # the worker may wait longer than a caller, but a hung store must not hold it for ever
COOL_DOWN_S = 0.25  # after a failure nobody asks for this long: a hung store costs 20 ms in 250, not each request
RETRY_S = 0.25  # between attempts to map the arena
LOOK_S = 5.0  # of an engine that asks for nothing: so long it may map the memory of a store that has ended
QUEUE_BYTES_MAX = 64 * 1024 * 1024  # guess: a thousand blocks of a small model wait, then offers are dropped
FAILURES = (grpc.RpcError, OSError, ValueError)

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),  # 65,536 blocks of one lookup are 5 MB
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),  # a restarted store is found again within a second
    ("grpc.enable_http_proxy", 0),  # the store is on this machine
]


@dataclass(frozen=True, slots=True)
class ClientStatistics:
    """Counts of one client since it was made; blocks except where it says otherwise."""

    lookups: int = 0  # calls
    hits: int = 0
    failures: int = 0  # calls that failed or came too late, lookups and stores
    corrupt: int = 0  # copies whose checksum was wrong
    offered: int = 0
    stored: int = 0
    dropped: int = 0  # offered and not stored by us: no room, no parent, no store, or there already


@dataclass(frozen=True, slots=True)
class _Offer:
    space: BlockSpace
    keys: tuple[bytes, ...]  # the chain from the first block
    blocks: tuple[BlockArray, ...]  # of the last keys

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


class _ReadLease:
    """A leased run of blocks: checks what was copied, and reports what was wrong with the release."""

    def __init__(
        self,
        arena: MappedArena,
        reply: kv_pb2.AcquirePrefixReply,
        keys: Sequence[bytes],
        give_back: Callable[[kv_pb2.ReleaseLeaseRequest], None],
        ends_s: float,
    ) -> None:
        self._ends_s = ends_s
        self._arena, self._reply, self._keys, self._give_back = arena, reply, keys, give_back
        self._request = kv_pb2.ReleaseLeaseRequest(lease_id=reply.lease_id)

    def verified(self, copied: int) -> int:
        """How many of the first `copied` blocks lie in the arena as they were written; none after the lease's time.

        A slot may have held another block while it was copied, and the same one, read from a disk, again by now."""
        if time.monotonic() > self._ends_s:
            return 0
        offsets, checksums = self._reply.offsets[:copied], self._reply.checksums[:copied]
        right = self._arena.right(offsets, self._reply.length, checksums)
        if right < copied:
            self._request.corrupt_keys.append(self._keys[right])
        return right

    @property
    def found_wrong(self) -> bool:
        """Whether a block was not as it was written."""
        return bool(self._request.corrupt_keys)

    def release(self) -> None:
        """Let the worker end the lease."""
        self._give_back(self._request)


def _flat(block: BlockArray) -> Bytes:
    """The bytes of a block, together."""
    return np.ascontiguousarray(block, np.float32).reshape(-1).view(np.uint8)


def _chunks(blocks: int, shared: int) -> Iterator[tuple[int, int]]:
    """Ranges of one reservation each: at most `CHUNK_BLOCKS`, and none over the end of the `shared` first ones."""
    first = 0
    while first < blocks:
        stop = min(blocks, first + CHUNK_BLOCKS)
        if first < shared < stop:
            stop = shared
        yield first, stop
        first = stop


class KvStoreClient:
    """See the module. Thread-safe."""

    def __init__(self, address: str, shape: BlockShape, model_digest: bytes) -> None:
        """Returns at once; until the store is found, lookups miss and offers wait."""
        self._shape = shape
        self._model_digest = model_digest
        self._client_id = f"reference-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub = kv_pb2_grpc.KvStoreStub(self._channel)
        self._arena: MappedArena | None = None
        self._resting_until_s = 0.0
        self._news = threading.Condition()
        self._offers: deque[_Offer] = deque()
        self._releases: deque[kv_pb2.ReleaseLeaseRequest] = deque()
        self._queued_bytes = 0
        self._busy = self._closing = False
        self._counts = ClientStatistics()
        self._writer = BlockWriter(self._stub, WORKER_TIMEOUT_S, self._give_back)
        self._worker = threading.Thread(target=self._work, name="kvstore-client", daemon=True)
        self._worker.start()

    def lookup(self, space: BlockSpace, keys: Sequence[bytes], patience_ms: int = 0) -> CachedPrefix:
        """See `BlockStore.lookup`. The arrays are the arena's own bytes, leased until `release`."""
        self._count(lookups=1)
        arena = self._arena
        # What was handed over is asked for all the same: the callers that wait for it are few, and it is much.
        rests = time.monotonic() < self._resting_until_s and not (space.hold and patience_ms)
        if arena is None or not keys or rests:
            return CachedPrefix()
        try:
            return self._read_prefix(arena, space, keys, patience_ms)
        except Exception:  # noqa: BLE001 - whatever went wrong with the store, the request goes on without it
            self._failed()
            return CachedPrefix()

    def offer(self, space: BlockSpace, keys: Sequence[bytes], blocks: Sequence[BlockArray]) -> None:
        """See `BlockStore.offer`."""
        offer = _Offer(space, tuple(keys), tuple(blocks))
        with self._news:
            fits = not self._closing and self._queued_bytes + offer.nbytes <= QUEUE_BYTES_MAX
            if fits:
                self._offers.append(offer)
                self._queued_bytes += offer.nbytes
                self._news.notify_all()
        self._count(offered=len(blocks), dropped=0 if fits else len(blocks))

    def flush(self, timeout_s: float) -> bool:
        """See `BlockStore.flush`."""
        with self._news:
            return self._news.wait_for(lambda: not (self._offers or self._releases or self._busy), timeout_s)

    def close(self) -> None:
        """See `BlockStore.close`. Offers that still wait are dropped. Waits for the call that is running."""
        with self._news:
            self._closing = True
            self._offers.clear()
            self._news.notify_all()
        self._worker.join(2 * WORKER_TIMEOUT_S)
        self._writer.close()
        self._channel.close()

    def wait_until_mapped(self, timeout_s: float) -> bool:
        """Wait until the store has been found; False when the time ran out first."""
        with self._news:
            return self._news.wait_for(lambda: self._arena is not None, timeout_s)

    def statistics(self) -> ClientStatistics:
        """Counts now."""
        return self._counts

    # Reading

    def _read_prefix(
        self, arena: MappedArena, space: BlockSpace, keys: Sequence[bytes], patience_ms: int
    ) -> CachedPrefix:
        request = kv_pb2.AcquirePrefixRequest(
            salt=space.salt,
            keys=keys,
            client_id=self._client_id,
            lease_ms=READ_LEASE_MS,
            wait_ms=patience_ms,
            shared=kv_pb2.SharedPrefix(salt=space.shared_salt, blocks=space.shared_blocks),
            peers=space.peers,
            hold=space.hold,
            packed=True,
        )
        ends_s = time.monotonic() + READ_LEASE_MS / 1000  # it begins later, so it ends later
        reply = self._stub.AcquirePrefix(request, timeout=LOOKUP_TIMEOUT_S + patience_ms / 1000)
        lease = _ReadLease(arena, reply, keys, self._give_back, ends_s)
        fits = reply.length == self._shape.nbytes and len(reply.offsets) == len(reply.checksums) <= len(keys)
        usable = self._is_current(arena, reply.incarnation) and fits
        blocks = self._views(arena, reply) if usable else ()
        if not blocks:
            lease.release()
            return CachedPrefix(more=reply.more)
        self._count(hits=len(blocks))

        def verified(copied: int) -> int:
            right = lease.verified(copied)
            self._count(corrupt=int(lease.found_wrong), hits=right - len(blocks))
            return right

        return CachedPrefix(blocks, lease.release, verified, reply.more)

    def _views(self, arena: MappedArena, reply: kv_pb2.AcquirePrefixReply) -> tuple[BlockArray, ...]:
        length, dimensions = reply.length, self._shape.dimensions
        return tuple(arena.view(offset, length).view(np.float32).reshape(dimensions) for offset in reply.offsets)

    # Writing, on the worker thread

    def _work(self) -> None:
        while True:
            with self._news:
                self._busy = False
                self._news.notify_all()
                is_idle = not self._news.wait_for(self._has_work, LOOK_S)
                if self._closing and not self._releases:
                    return
                self._busy = bool(self._offers or self._releases)
                release = self._releases.popleft() if self._releases else None
                offer = self._offers.popleft() if self._offers and release is None else None
                self._queued_bytes -= offer.nbytes if offer is not None else 0
            try:
                if release is not None:
                    self._stub.ReleaseLease(release, timeout=WORKER_TIMEOUT_S)
                elif self._map() and offer is not None:
                    self._store(offer)
                elif offer is not None:
                    self._count(dropped=len(offer.blocks))
                elif is_idle:
                    self._look()
            except Exception as error:  # noqa: BLE001 - the worker outlives every fault of the store
                self._failed(dropped=len(offer.blocks) if offer is not None else 0)
                self._forget_if_ended(error)

    def _look(self) -> None:
        """See whether the store is still there, and the same. Keeps no reference to its arena."""
        arena = self._arena
        if arena is not None:
            found = self._stub.DescribeArena(kv_pb2.DescribeArenaRequest(), timeout=WORKER_TIMEOUT_S)
            self._is_current(arena, found.incarnation)

    def _has_work(self) -> bool:
        return self._closing or self._arena is None or bool(self._offers or self._releases)

    def _map(self) -> bool:
        """Map the arena if there is none; False, after a pause, if the store is not there."""
        if self._arena is not None:
            return True
        try:
            found = MappedArena(self._stub.DescribeArena(kv_pb2.DescribeArenaRequest(), timeout=WORKER_TIMEOUT_S))
        except FAILURES:
            with self._news:
                self._news.wait_for(lambda: self._closing, RETRY_S)
            return False
        with self._news:
            self._arena = found
            self._resting_until_s = 0.0
            self._news.notify_all()
        return True

    def _store(self, offer: _Offer) -> None:
        stored = 0
        if (arena := self._arena) is not None:
            try:
                stored = self._writer.store(arena, list(self._chunks_of(offer)))
            except StaleArena:
                self._forget(arena)
        self._count(stored=stored, dropped=len(offer.blocks) - stored)

    def _chunks_of(self, offer: _Offer) -> Iterator[Chunk]:
        skipped = len(offer.keys) - len(offer.blocks)
        space = offer.space
        for first, stop in _chunks(len(offer.blocks), space.shared_blocks - skipped):
            keys = offer.keys[skipped + first : skipped + stop]
            request = kv_pb2.ReserveBlocksRequest(
                salt=space.shared_salt if skipped + first < space.shared_blocks else space.salt,
                model_digest=self._model_digest,
                keys=keys,
                parent_key=offer.keys[skipped + first - 1] if skipped + first else b"",
                parent_salt=space.shared_salt,
                length=self._shape.nbytes,
                client_id=self._client_id,
                lease_ms=WRITE_LEASE_MS,
            )
            yield Chunk(request, dict(zip(keys, map(_flat, offer.blocks[first:stop]), strict=True)))

    # Both

    def _give_back(self, release: kv_pb2.ReleaseLeaseRequest) -> None:
        """Let the worker end a lease; it ends by itself if the worker cannot."""
        if release.lease_id:
            with self._news:
                self._releases.append(release)
                self._news.notify_all()

    def _is_current(self, arena: MappedArena, incarnation: str) -> bool:
        """Whether a reply speaks of the mapped arena; if not, the worker maps the new one."""
        if arena.incarnation != incarnation:
            self._forget(arena)
        return arena.incarnation == incarnation

    def _forget_if_ended(self, error: Exception) -> None:
        """Nobody listens any more: the memory goes too, because the next store may need its room."""
        arena = self._arena
        if arena is not None and isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAVAILABLE:
            self._forget(arena)

    def _forget(self, arena: MappedArena) -> None:
        """Let the worker map the store's arena anew."""
        with self._news:
            if self._arena is arena:
                self._arena = None
            self._news.notify_all()

    def _failed(self, dropped: int = 0) -> None:
        self._resting_until_s = time.monotonic() + COOL_DOWN_S
        self._count(failures=1, dropped=dropped)

    def _count(self, **more: int) -> None:
        with self._news:
            self._counts = replace(
                self._counts, **{name: getattr(self._counts, name) + count for name, count in more.items()}
            )


def connect(address: str, shape: BlockShape, parameters: Mapping[str, str]) -> KvStoreClient:
    """The client for a model with `parameters`; returns at once, whether the store is up or not."""
    return KvStoreClient(address, shape, named_bytes(parameters.get("model_digest", "")))
