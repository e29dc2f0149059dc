"""How the vLLM connector talks to the node's kvstore: lookups with a lease, reads in place, saves in the background.

As the reference engine's client: every fault is a miss, no save ever waits, and a block counts only if the arena holds
what its writer meant to write, looked at after it was copied (invariant 11).
"""

from __future__ import annotations

import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc
import numpy as np
from numpy.typing import NDArray

from engines.block_arena import MappedArena
from engines.block_writer import write_in_time
from engines.vllm.block_saves import SavePlan
from roundhouse.wire.v1 import kv_pb2, kv_pb2_grpc

LOOKUP_TIMEOUT_S = 0.050  # vLLM's scheduler waits meanwhile
READ_LEASE_MS = 10_000
WRITE_LEASE_MS = 5_000
CALL_TIMEOUT_S = 1.0
COOL_DOWN_S = 0.25  # after a failure nobody asks for this long
LOOK_S = 5.0  # of an engine that asks for nothing: so long it may map the memory of a store that has ended
CLOSE_S = 5.0  # a store that hangs must not hold up the end of an engine
SAVES_MAX = 64  # chunks that wait; more are dropped, which costs a miss

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A leased run of blocks: where each lies in the arena of `incarnation`."""

    lease_id: str
    incarnation: str
    length: int
    offsets: tuple[int, ...] = ()
    checksums: tuple[int, ...] = ()
    ends_s: float = 0.0  # monotonic, of this machine; later a slot may hold another block


NOTHING_FOUND = FoundRun("", "", 0)


class StoreLink:
    """One connection. Thread-safe."""

    def __init__(self, address: str) -> None:
        """Returns at once, whether the store is up or not."""
        self._client_id = f"vllm-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self._stub = kv_pb2_grpc.KvStoreStub(self._channel)
        self._arena: MappedArena | None = None
        self._resting_until_s = 0.0
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(SAVES_MAX)
        self._worker = threading.Thread(target=self._run, name="kvstore-link", daemon=True)
        self._worker.start()
        self.corrupt = self.failures = self.saved = 0

    def lookup(self, salt: bytes, keys: Sequence[bytes]) -> FoundRun:
        """The longest stored run, leased; nothing on a miss, a late answer or any failure."""
        if not keys or time.monotonic() < self._resting_until_s:
            return NOTHING_FOUND
        request = kv_pb2.AcquirePrefixRequest(
            salt=salt, keys=keys, client_id=self._client_id, lease_ms=READ_LEASE_MS, packed=True
        )
        ends_s = time.monotonic() + READ_LEASE_MS / 1000
        try:
            reply = self._stub.AcquirePrefix(request, timeout=LOOKUP_TIMEOUT_S)
        except grpc.RpcError:
            self._failed()
            return NOTHING_FOUND
        offsets, checksums = tuple(reply.offsets), tuple(reply.checksums)
        return FoundRun(reply.lease_id, reply.incarnation, reply.length, offsets, checksums, ends_s)

    def read(self, run: FoundRun, number: int, copy: Callable[[Bytes], None]) -> bool:
        """Hand block `number` of a run to `copy`, in place; whether what was copied is right."""
        arena = self._mapped(run.incarnation)
        if arena is None:
            return False
        try:
            copy(arena.view(run.offsets[number], run.length))
            right = arena.is_right(run.offsets[number], run.length, run.checksums[number])
        except ValueError:
            right = False
        self.corrupt += not right
        return right and time.monotonic() <= run.ends_s  # else it may be right by now only

    def release(self, run: FoundRun) -> None:
        """End a lease in the background; it ends by itself otherwise."""
        if run.lease_id:
            request = kv_pb2.ReleaseLeaseRequest(lease_id=run.lease_id)
            self._later(lambda: self._stub.ReleaseLease(request, timeout=CALL_TIMEOUT_S))

    def save(self, plan: SavePlan, blocks: Sequence[Bytes], model_digest: bytes) -> None:
        """Store copies of blocks in the background, or drop them."""
        self._later(lambda: self._save(plan, blocks, model_digest))

    def flush(self) -> None:
        """Wait until what was handed over is stored or dropped."""
        self._work.join()

    def close(self) -> None:
        """Store what waits, for a moment, and end. Idempotent."""
        if self._worker.is_alive():
            self._work.put(None)
            self._worker.join(CLOSE_S)
            self._channel.close()

    def _later(self, work: Callable[[], object]) -> None:
        def run() -> None:
            work()

        try:
            self._work.put_nowait(run)
        except queue.Full:
            self.failures += 1

    def _run(self) -> None:
        while (work := self._next()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the worker outlives every fault of the store
                self._failed()
                if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAVAILABLE:
                    self._arena = None  # nobody listens any more: the next store may need the memory
            finally:
                if work != self._look:
                    self._work.task_done()

    def _next(self) -> Callable[[], object] | None:
        """What is to be done; after a while without anything, to see whether the store is still there."""
        try:
            return self._work.get(timeout=LOOK_S)
        except queue.Empty:
            return self._look

    def _look(self) -> None:
        arena = self._arena
        if arena is not None:
            found = self._stub.DescribeArena(kv_pb2.DescribeArenaRequest(), timeout=CALL_TIMEOUT_S)
            if found.incarnation != arena.incarnation:
                self._arena = None

    def _save(self, plan: SavePlan, blocks: Sequence[Bytes], model_digest: bytes) -> None:
        ends_s = time.monotonic() + WRITE_LEASE_MS / 1000  # of a lease that begins later, so ends later
        reply = self._stub.ReserveBlocks(
            kv_pb2.ReserveBlocksRequest(
                salt=plan.salt,
                model_digest=model_digest,
                keys=plan.keys,
                parent_key=plan.parent_key,
                length=len(blocks[0]),
                client_id=self._client_id,
                lease_ms=WRITE_LEASE_MS,
                packed=True,
            ),
            timeout=CALL_TIMEOUT_S,
        )
        if not reply.lease_id:
            return
        arena = self._mapped(reply.incarnation)
        checksums = write_in_time(arena, reply, blocks, ends_s) if arena is not None else None
        if checksums is None:
            self._stub.ReleaseLease(kv_pb2.ReleaseLeaseRequest(lease_id=reply.lease_id), timeout=CALL_TIMEOUT_S)
            return
        commit = kv_pb2.CommitBlocksRequest(lease_id=reply.lease_id, checksums=checksums)
        self.saved += self._stub.CommitBlocks(commit, timeout=CALL_TIMEOUT_S).committed

    def _mapped(self, incarnation: str) -> MappedArena | None:
        """The arena that a reply speaks of; None if the store has another one by now."""
        arena = self._arena
        if arena is None or arena.incarnation != incarnation:
            try:
                description = self._stub.DescribeArena(kv_pb2.DescribeArenaRequest(), timeout=CALL_TIMEOUT_S)
                arena = self._arena = MappedArena(description)
            except (grpc.RpcError, OSError, ValueError):
                self._failed()
                return None
        return arena if arena.incarnation == incarnation else None

    def _failed(self) -> None:
        self.failures += 1
        self._resting_until_s = time.monotonic() + COOL_DOWN_S
