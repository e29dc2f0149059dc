"""A `BlockStore` over the node's kvstore: keys and leases over gRPC, the bytes in shared memory.

```
intake thread   lookup --AcquirePrefix--> copy out of the arena, check, hand over --release--+
step thread     offer --> queue --+                                                          |
worker thread                     +--> ReserveBlocks, copy into the arena, CommitBlocks <----+
```

Losing the store is never an error: a late, failed or wrong answer is a miss, a full queue drops the offer, and both are
counted. A copy is used only if its checksum is right after it was made, so a lease that ran out, a store that was
restarted or a bit that fell over cannot change the text (invariant 11). Offers never wait; a lookup waits at most
`LOOKUP_TIMEOUT_S` for the answer and `COPY_BUDGET_S` for the copy. Reconnects by itself.
Decision: docs/decisions/0052-engine-client.md.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import grpc
import numpy as np
import xxhash
from numpy.typing import NDArray

from engines.reference.kv_cache import BlockArray, BlockShape, CachedPrefix
from engines.reference.loaded_model import named_bytes
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc

LOOKUP_TIMEOUT_S = 0.020  # a prefix block saves about this much prefill on a small model; later is not worth it
DISK_WAIT_MS = 12  # of the above; 25 MB from a disk of 2 GB/s. What comes later is there for the next request
COPY_BUDGET_S = 0.050  # 250 MB at 5 GB/s; what was copied by then is used
READ_LEASE_MS = 2_000  # many times the two limits above
WRITE_LEASE_MS = 5_000  # a chunk takes milliseconds; a killed engine holds its slots no longer than this
WORKER_TIMEOUT_S = 1.0  # the worker may wait longer than a caller, but a hung store must not hold it for ever
COOL_DOWN_S = 0.25  # after a failure nobody asks for this long: a hung store costs 20 ms in 250, not each request
RETRY_S = 0.25  # between attempts to map the arena
CHUNK_BLOCKS = 64  # blocks of one reservation; others may write in between
QUEUE_BYTES_MAX = 64 * 1024 * 1024  # guess: a thousand blocks of a small model wait, then offers are dropped
MAP_AHEAD_BYTES_MAX = 1 << 30  # 0.2 s of the worker's time, before the first block
MAP_STEP_BYTES = 16 << 20  # 3 ms, for which the interpreter is held
MADV_POPULATE_WRITE = 23  # Linux 5.14, <linux/mman.h>; not named by Python 3.11
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
    salt: bytes
    keys: tuple[bytes, ...]  # the chain from the first block
    blocks: tuple[BlockArray, ...]  # of the last keys

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)


class _MappedArena:
    """The arena of one incarnation of the store. Goes with its last reader."""

    def __init__(self, description: kv_pb2.Arena) -> None:
        self.incarnation = description.incarnation
        descriptor = os.open(description.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size != description.bytes:
                raise ValueError("the arena's file has another size than the store says")
            mapped = mmap.mmap(descriptor, description.bytes)
        finally:
            os.close(descriptor)
        _map_pages(mapped)
        self._bytes: NDArray[np.uint8] = np.frombuffer(mapped, np.uint8)

    def copy_out(self, slot: kv_pb2.BlockSlot) -> NDArray[np.uint8] | None:
        """A copy of the bytes of a slot; None if they do not match their checksum."""
        copy = self._bytes[slot.offset : slot.offset + slot.length].copy()
        return copy if xxhash.xxh3_64_intdigest(copy.data) == slot.checksum else None

    def copy_in(self, slot: kv_pb2.BlockSlot, block: BlockArray) -> int:
        """Write a block into its slot; returns the checksum of what should be there now."""
        data = np.ascontiguousarray(block, np.float32).reshape(-1).view(np.uint8)
        self._bytes[slot.offset : slot.offset + slot.length] = data
        return xxhash.xxh3_64_intdigest(data.data)


def _map_pages(mapped: mmap.mmap) -> None:
    """Enter the arena's pages into this process's tables now: later, each would be a fault in the middle of a copy.

    Measured: 0.2 s a GB, and first writes at 1.1 GB/s instead of 2.7. The rest of a large arena faults when it is used.
    """
    with suppress(OSError):  # before Linux 5.14
        for start in range(0, min(len(mapped), MAP_AHEAD_BYTES_MAX), MAP_STEP_BYTES):
            mapped.madvise(MADV_POPULATE_WRITE, start, min(MAP_STEP_BYTES, len(mapped) - start))


class KvStoreClient:
    """See the module. Thread-safe."""

    def __init__(self, address: str, shape: BlockShape, model_digest: bytes) -> None:
        """Returns at once; until the store is found, lookups miss and offers wait."""
        self._shape = shape
        self._model_digest = model_digest
        self._client_id = f"reference-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub = kv_pb2_grpc.KvStoreStub(self._channel)
        self._arena: _MappedArena | None = None
        self._resting_until_s = 0.0
        self._news = threading.Condition()
        self._offers: deque[_Offer] = deque()
        self._releases: deque[kv_pb2.ReleaseLeaseRequest] = deque()
        self._queued_bytes = 0
        self._busy = self._closing = False
        self._counts = ClientStatistics()
        self._worker = threading.Thread(target=self._work, name="kvstore-client", daemon=True)
        self._worker.start()

    def lookup(self, salt: bytes, keys: Sequence[bytes]) -> CachedPrefix:
        """See `BlockStore.lookup`; the arrays are copies, so there is nothing to release."""
        self._count(lookups=1)
        arena = self._arena
        if arena is None or not keys or time.monotonic() < self._resting_until_s:
            return CachedPrefix()
        try:
            blocks = self._read_prefix(arena, salt, keys)
        except Exception:  # noqa: BLE001 - whatever went wrong with the store, the request goes on without it
            self._failed()
            return CachedPrefix()
        self._count(hits=len(blocks))
        return CachedPrefix(blocks)

    def offer(self, salt: bytes, keys: Sequence[bytes], blocks: Sequence[BlockArray]) -> None:
        """See `BlockStore.offer`."""
        offer = _Offer(salt, tuple(keys), tuple(blocks))
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
        self._channel.close()

    def wait_until_mapped(self, timeout_s: float) -> bool:
        """Wait until the store has been found; False when the time ran out first."""
        with self._news:
            return self._news.wait_for(lambda: self._arena is not None, timeout_s)

    def statistics(self) -> ClientStatistics:
        """Counts now."""
        return self._counts

    # Reading

    def _read_prefix(self, arena: _MappedArena, salt: bytes, keys: Sequence[bytes]) -> tuple[BlockArray, ...]:
        request = kv_pb2.AcquirePrefixRequest(
            salt=salt, keys=keys, client_id=self._client_id, lease_ms=READ_LEASE_MS, wait_ms=DISK_WAIT_MS
        )
        reply = self._stub.AcquirePrefix(request, timeout=LOOKUP_TIMEOUT_S)
        release = kv_pb2.ReleaseLeaseRequest(lease_id=reply.lease_id)
        try:
            if not self._is_current(arena, reply.incarnation):
                return ()
            return self._copy_run(arena, keys, reply.blocks, release)
        finally:
            self._give_back(release)

    def _copy_run(
        self,
        arena: _MappedArena,
        keys: Sequence[bytes],
        slots: Sequence[kv_pb2.BlockSlot],
        release: kv_pb2.ReleaseLeaseRequest,
    ) -> tuple[BlockArray, ...]:
        """Copies of the leading blocks that are right; a wrong one is reported with the release."""
        blocks: list[BlockArray] = []
        ends_s = time.monotonic() + COPY_BUDGET_S
        for key, slot in zip(keys, slots, strict=False):
            if slot.key != key or slot.length != self._shape.nbytes or time.monotonic() > ends_s:
                break
            copy = arena.copy_out(slot)
            if copy is None:
                self._count(corrupt=1)
                release.corrupt_keys.append(key)
                break
            blocks.append(copy.view(np.float32).reshape(self._shape.dimensions))
        return tuple(blocks)

    # Writing, on the worker thread

    def _work(self) -> None:
        while True:
            with self._news:
                self._busy = False
                self._news.notify_all()
                self._news.wait_for(self._has_work)
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
            except Exception:  # noqa: BLE001 - the worker outlives every fault of the store
                self._failed(dropped=len(offer.blocks) if offer is not None else 0)

    def _has_work(self) -> bool:
        return self._closing or self._arena is None or bool(self._offers or self._releases)

    def _map(self) -> bool:
        """Map the arena if there is none; False, after a pause, if the store is not there."""
        if self._arena is not None:
            return True
        try:
            found = _MappedArena(self._stub.DescribeArena(kv_pb2.DescribeArenaRequest(), timeout=WORKER_TIMEOUT_S))
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
        arena = self._arena
        skipped = len(offer.keys) - len(offer.blocks)
        stored = 0
        for first in range(0, len(offer.blocks), CHUNK_BLOCKS):
            chunk = dict(zip(offer.keys[skipped + first :], offer.blocks[first : first + CHUNK_BLOCKS], strict=False))
            parent = offer.keys[skipped + first - 1] if skipped + first else b""
            committed = self._store_chunk(arena, offer.salt, parent, chunk) if arena is not None else None
            if committed is None:
                break
            stored += committed
        self._count(stored=stored, dropped=len(offer.blocks) - stored)

    def _store_chunk(
        self, arena: _MappedArena, salt: bytes, parent: bytes, blocks: Mapping[bytes, BlockArray]
    ) -> int | None:
        """How many blocks were stored; None if the arena is not the store's any more."""
        reserve = kv_pb2.ReserveBlocksRequest(
            salt=salt,
            model_digest=self._model_digest,
            keys=blocks,
            parent_key=parent,
            length=self._shape.nbytes,
            client_id=self._client_id,
            lease_ms=WRITE_LEASE_MS,
        )
        ends_s = time.monotonic() + WRITE_LEASE_MS / 1000
        reply = self._stub.ReserveBlocks(reserve, timeout=WORKER_TIMEOUT_S)
        committed = None
        try:
            if not self._is_current(arena, reply.incarnation):
                return None
            if reply.lease_id and self._write(arena, reply.slots, blocks, ends_s):
                commit = kv_pb2.CommitBlocksRequest(lease_id=reply.lease_id, blocks=reply.slots)
                committed = self._stub.CommitBlocks(commit, timeout=WORKER_TIMEOUT_S).committed
            return committed or 0
        finally:
            if committed is None:  # else nobody could write these keys until the lease ends
                self._give_back(kv_pb2.ReleaseLeaseRequest(lease_id=reply.lease_id))

    def _write(
        self,
        arena: _MappedArena,
        slots: Sequence[kv_pb2.BlockSlot],
        blocks: Mapping[bytes, BlockArray],
        ends_s: float,
    ) -> bool:
        """Fill the slots and their checksums; False if the lease ended meanwhile, so that a slot may be another's."""
        for slot in slots:
            if time.monotonic() > ends_s:
                return False
            slot.checksum = arena.copy_in(slot, blocks[slot.key])
        return True

    # Both

    def _give_back(self, release: kv_pb2.ReleaseLeaseRequest) -> None:
        """Let the worker end a lease; it ends by itself if the worker cannot."""
        if release.lease_id:
            with self._news:
                self._releases.append(release)
                self._news.notify_all()

    def _is_current(self, arena: _MappedArena, incarnation: str) -> bool:
        """Whether a reply speaks of the mapped arena; if not, the worker maps the new one."""
        if arena.incarnation == incarnation:
            return True
        with self._news:
            if self._arena is arena:
                self._arena = None
            self._news.notify_all()
        return False

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
