"""Reads memory of other nodes with NVIDIA's NIXL: RDMA where there is any, shared memory or TCP where there is none.

Backend UCX reads a peer's memory from outside, without a call there; backend POSIX reads the file of a peer's arena,
which this machine must see. NIXL is an optional extra and is imported only here. All its calls come from one thread of
this agent. A read that is given up may go on writing for as long as NIXL likes, so bytes come into buffers of the
agent's own, never into a slot: such a buffer is set aside until its read has ended. What comes is unchecked; every
fault is a `PeerFault`. Decision: docs/decisions/0140-nixl.md.
"""

import asyncio
import ctypes
import importlib
import mmap
import os
import stat
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from roundhouse.errors import Unavailable
from roundhouse.wire.v1 import kv_pb2
from services.kvstore.ports import BlockArena, PeerFault

log = structlog.get_logger(__name__)

KINDS = {"nixl-ucx": "UCX", "nixl-posix": "POSIX"}
MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")  # the last two need no CUDA and no torch for these backends
BUFFER_BYTES = 8 << 20  # of one read: 4 ms at 2 GB/s, so that few peers share the thread well; larger blocks get larger
READS_MAX = 4  # at once; others wait
STUCK_MAX = 4  # buffers set aside; then nothing is read until one comes back
LOOK_S = 0.000_5  # between two looks at a read: a tenth of its time

T = TypeVar("T")


def is_installed() -> bool:
    """Whether NIXL can be imported."""
    return _module() is not None


@dataclass(frozen=True, slots=True)
class Source:
    """A peer's arena as this agent reaches it: `remote` is the name of its agent, `device` the open file, if one is."""

    remote: str
    address: int
    nbytes: int
    device: int = 0
    registered: Any = None


@dataclass(slots=True)
class _Buffer:
    memory: mmap.mmap
    address: int
    registered: Any

    @property
    def nbytes(self) -> int:
        return len(self.memory)


@dataclass(slots=True)
class _Reading:
    """One read. Touched by the agent's thread only, once it has begun."""

    buffer: _Buffer | None = None  # until the thread has given it one
    handle: Any = None
    state: str = ""


class NixlAgent:
    """One process's end of all transfers."""

    def __init__(self, kind: str, name: str) -> None:
        """`kind` is one of `KINDS`; `name` is unique among nodes and restarts. Raises Unavailable without NIXL."""
        module = _module()
        if module is None:
            raise Unavailable(f"peer transport {kind} needs NIXL, which is not installed: pip install roundhouse[nixl]")
        self.kind, self._name, self._backend = kind, name, KINDS[kind]
        self._threads = ThreadPoolExecutor(1, "nixl")
        self._agent: Any = self._threads.submit(_agent, module, name, self._backend).result()
        self._reads = asyncio.Semaphore(READS_MAX)
        self._free: list[_Buffer] = []
        self._stuck: list[_Reading] = []

    def offer(self, arena: BlockArena, incarnation: str) -> kv_pb2.TransferSource:
        """Let peers read an arena; what they need to know. Blocking; call before `close`, once."""
        address = _address(arena.view(0, arena.nbytes))
        metadata = b""
        if self._backend == "UCX":
            self._threads.submit(self._register, "DRAM", address, arena.nbytes, 0).result()
            metadata = self._threads.submit(self._agent.get_agent_metadata).result()
        return kv_pb2.TransferSource(
            kind=self.kind,
            incarnation=incarnation,
            agent_metadata=metadata,
            address=address,
            bytes=arena.nbytes,
            path=os.path.abspath(arena.path) if arena.path else "",
        )

    async def open(self, source: kv_pb2.TransferSource) -> Source:
        """Get to know a peer's arena. Raises PeerFault."""
        return await self._call(self._open, source)

    async def forget(self, source: Source) -> None:
        """Let go of a peer's arena. Idempotent; never fails."""
        with suppress(PeerFault):
            await self._call(self._forget, source)

    @asynccontextmanager
    async def read(self, source: Source, spans: Sequence[tuple[int, int]]) -> AsyncIterator[memoryview]:
        """The bytes of (offset, length) spans of a peer's arena, one after the other; valid inside. Raises PeerFault.

        Cancelled, the buffer is set aside until NIXL has done with it."""
        if any(offset + length > source.nbytes for offset, length in spans):
            raise PeerFault("a block outside of the peer's arena")
        async with self._reads:
            reading = _Reading()
            try:
                await self._call(self._take, reading, sum(length for _, length in spans))
                await self._call(self._post, reading, source, spans)
                while reading.state == "PROC":
                    await asyncio.sleep(LOOK_S)
                    await self._call(self._look, reading)
                if reading.state != "DONE":
                    raise PeerFault("NIXL could not read")
                assert reading.buffer is not None
                with memoryview(reading.buffer.memory) as view:
                    yield view
            finally:  # in the order of the thread: after whatever of this read is still to be done there
                self._threads.submit(self._give_back, reading)

    def close(self) -> None:
        """End everything. Buffers of reads that go on are lost to this process."""
        self._threads.shutdown(wait=True)
        self._stuck.clear()
        self._free.clear()
        self._agent = None

    # On the agent's thread

    def _open(self, source: kv_pb2.TransferSource) -> Source:
        if self._backend == "UCX":
            remote = self._agent.add_remote_agent(source.agent_metadata)
            return Source(remote.decode() if isinstance(remote, bytes) else remote, source.address, source.bytes)
        descriptor = os.open(source.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size != source.bytes:
            os.close(descriptor)
            raise PeerFault("the peer's arena is not a file of this machine")
        registered = self._register("FILE", 0, source.bytes, descriptor)
        return Source(self._name, 0, source.bytes, descriptor, registered)

    def _forget(self, source: Source) -> None:
        if source.registered is None:
            self._agent.remove_remote_agent(source.remote)
            return
        self._agent.deregister_memory(source.registered, backends=[self._backend])
        os.close(source.device)

    def _register(self, segment: str, address: int, nbytes: int, device: int) -> Any:
        return self._agent.register_memory([(address, nbytes, device, "")], segment, backends=[self._backend])

    def _take(self, reading: _Reading, nbytes: int) -> None:
        """Give a read a buffer of at least `nbytes`."""
        for stuck in tuple(self._stuck):
            self._stuck.remove(stuck)
            self._give_back(stuck)
        if len(self._stuck) >= STUCK_MAX:
            raise PeerFault("reads that were given up have not ended")
        buffer = self._free.pop() if self._free else None
        if buffer is not None and buffer.nbytes < nbytes:
            self._agent.deregister_memory(buffer.registered, backends=[self._backend])
            buffer = None
        reading.buffer = buffer or self._new_buffer(max(nbytes, BUFFER_BYTES))

    def _new_buffer(self, nbytes: int) -> _Buffer:
        memory = mmap.mmap(-1, nbytes)
        address = _address(memoryview(memory))
        return _Buffer(memory, address, self._register("DRAM", address, nbytes, 0))

    def _post(self, reading: _Reading, source: Source, spans: Sequence[tuple[int, int]]) -> None:
        assert reading.buffer is not None
        at, here, there = reading.buffer.address, [], []
        for offset, length in spans:
            here.append((at, length, 0))
            there.append((source.address + offset, length, source.device))
            at += length
        segment = "DRAM" if source.registered is None else "FILE"
        handle = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs(here, "DRAM"),
            self._agent.get_xfer_descs(there, segment),
            source.remote,
            b"",
            [self._backend],
        )
        reading.handle, reading.state = (
            handle,
            "PROC",
        )  # set before it begins: then it is looked at again, whatever comes
        reading.state = self._agent.transfer(handle)

    def _look(self, reading: _Reading) -> None:
        reading.state = self._agent.check_xfer_state(reading.handle)

    def _give_back(self, reading: _Reading) -> None:
        """The buffer is free if nothing writes into it any more; else it is set aside."""
        try:
            if reading.handle is not None:
                if reading.state == "PROC":
                    self._look(reading)
                if reading.state == "PROC":
                    self._stuck.append(reading)
                    return
                reading.handle.release()
        except Exception:  # noqa: BLE001 - NIXL's errors have no common class; a peer that died: nobody writes any more
            log.debug("nixl_read_failed")
        reading.handle = None
        if reading.buffer is not None:
            self._free.append(reading.buffer)

    async def _call(self, work: Callable[..., T], *details: object) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *details)
        except PeerFault:
            raise
        except Exception as error:  # NIXL's errors have no common class
            raise PeerFault(f"NIXL: {type(error).__name__}") from error


def _module() -> Any:
    for name in MODULES:
        with suppress(ImportError):
            return importlib.import_module(name)
    return None


def _agent(module: Any, name: str, backend: str) -> Any:
    return module.nixl_agent(name, module.nixl_agent_config(backends=[backend]))


def _address(view: memoryview) -> int:
    """Where a view's bytes lie in this process; keeps nothing of it."""
    with view:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
