"""Puts chains of blocks into the node's kvstore: reserve slots, write into the arena, publish.

Long chains go in chunks. While one is written, a second thread asks for the slots of the next one and publishes the one
before, so that of all calls only the first and the last are waited for. (Calls of gRPC that answer later, `future`,
start a thread each: half a millisecond of the writer's time, as much as 4 MiB.) A chain of one chunk needs no other
thread.

Invariant: what was reserved is published or given back before `store` ends. Not here: what to store, when, and what a
failure means. One `store` at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise

from engines.block_arena import Bytes, MappedArena
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc

CHUNK_BLOCKS = 256  # blocks of one reservation: a millisecond of the store's time; others may write in between
PIECE_BYTES = 16 << 20  # a millisecond or two of copying, after which the time of the lease is looked at


class StaleArena(Exception):
    """The store has another arena than the one that was written to: it was restarted."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What is asked for, and the bytes of each of its keys; `request.length` each."""

    request: kv_pb2.ReserveBlocksRequest
    blocks: Mapping[bytes, Bytes]


@dataclass(frozen=True, slots=True)
class _Reservation:
    reply: kv_pb2.ReserveBlocksReply
    ends_s: float  # monotonic; later a slot may be another's


def write_in_time(
    arena: MappedArena, reply: kv_pb2.ReserveBlocksReply, blocks: Sequence[Bytes], ends_s: float
) -> list[int] | None:
    """Copy those of `blocks`, one of each key that was asked for, that a packed reply has slots for.

    Their checksums in the order of the slots; None if the lease ended before the last were begun. Raises ValueError
    if the reply is nonsense."""
    numbers = reply.numbers or range(len(reply.offsets))
    if any(number >= len(blocks) for number in numbers):
        raise ValueError("a slot for a block that was not asked for")
    taken, checksums = [blocks[number] for number in numbers], list[int]()
    if len(taken) != len(reply.offsets):
        raise ValueError("not one slot for each block")
    step = max(1, PIECE_BYTES // max(1, len(taken[0]))) if taken else 1
    for first in range(0, len(taken), step):
        if time.monotonic() > ends_s:
            return None
        checksums += arena.write(reply.offsets[first : first + step], taken[first : first + step])
    return checksums


class BlockWriter:
    """See the module. `give_back` is to end a lease, soon, and does not fail."""

    def __init__(
        self, stub: kv_pb2_grpc.KvStoreStub, timeout_s: float, give_back: Callable[[kv_pb2.ReleaseLeaseRequest], None]
    ) -> None:
        """`timeout_s` is of each call."""
        self._stub, self._timeout_s, self._give_back = stub, timeout_s, give_back
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="kvstore-writer")

    def close(self) -> None:
        """Waits for the call that is running. Idempotent."""
        self._calls.shutdown()

    def store(self, arena: MappedArena, chunks: Sequence[Chunk]) -> int:
        """How many blocks of a chain are published by us. Those that are there already are not; nor are those for
        which there is no room, or that took longer than their lease, and what follows them.

        Raises StaleArena, grpc.RpcError if a call fails, and ValueError if its answer is nonsense."""
        leases: set[str] = set()
        reserving: list[Future[_Reservation]] = []
        publishing: list[Future[int]] = []
        try:
            reservation = self._reserve(chunks[0], leases)
            for chunk, following in pairwise((*chunks, None)):
                assert chunk is not None
                if following is not None:
                    reserving.append(self._calls.submit(self._reserve, following, leases))
                commit = self._written(arena, reservation, chunk)
                if following is not None:
                    publishing.append(self._calls.submit(self._publish, commit, leases))
                    reservation = reserving[-1].result()
            before = sum(call.result() for call in publishing)  # parents become visible before their children
            return before + self._publish(commit, leases)
        finally:
            wait(reserving)
            wait(publishing)
            for lease_id in leases:  # else nobody could write these keys until the lease ends
                self._give_back(kv_pb2.ReleaseLeaseRequest(lease_id=lease_id))

    def _reserve(self, chunk: Chunk, leases: set[str]) -> _Reservation:
        ends_s = time.monotonic() + chunk.request.lease_ms / 1000
        chunk.request.packed = True
        reply = self._stub.ReserveBlocks(chunk.request, timeout=self._timeout_s)
        if reply.lease_id:
            leases.add(reply.lease_id)
        return _Reservation(reply, ends_s)

    def _written(
        self, arena: MappedArena, reservation: _Reservation, chunk: Chunk
    ) -> kv_pb2.CommitBlocksRequest | None:
        """Fill the slots and their checksums; None if there are none, or the lease ended meanwhile."""
        reply = reservation.reply
        if reply.incarnation != arena.incarnation:
            raise StaleArena
        if not reply.lease_id:
            return None
        blocks = [chunk.blocks[key] for key in chunk.request.keys]
        checksums = write_in_time(arena, reply, blocks, reservation.ends_s)
        if checksums is None:
            return None
        return kv_pb2.CommitBlocksRequest(lease_id=reply.lease_id, checksums=checksums)

    def _publish(self, commit: kv_pb2.CommitBlocksRequest | None, leases: set[str]) -> int:
        if commit is None:
            return 0
        committed = self._stub.CommitBlocks(commit, timeout=self._timeout_s).committed
        leases.discard(commit.lease_id)
        return committed
