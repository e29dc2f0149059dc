"""The processes of Triton and of its Python backend, one stub a model instance, found by their command lines in /proc.

    triton_python_backend_stub MODEL_PY SHM_REGION … INSTANCE_NAME …      INSTANCE_NAME is `<model>_<group>_<number>`

Works where the loader shares Triton's process namespace (one host, or a pod that shares it); elsewhere it cannot tell
and says so. Source: Triton's python_backend, src/stub_launcher.cc.
"""

import asyncio
import os
import re
import signal
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from roundhouse.errors import Unavailable
from services.loader.adapters.process_table import PROC, Process, ProcessTable, own_bytes, runs
from services.loader.device_ports import ServerMemory

_STUB = b"triton_python_backend_stub"
END_LOOKS, END_LOOK_S = 100, 0.05  # 5 s: the kernel takes about a second to free 100 GB


class StubProcesses:
    """`ModelProcesses` of the Triton that was told to listen on `grpc_port`, if its processes can be seen here."""

    def __init__(self, grpc_port: int, proc: Path = PROC) -> None:
        self._option = f"--grpc-port={grpc_port}".encode()
        self._proc = proc

    async def find(self, triton_name: str) -> Sequence[int] | None:
        """See `ModelProcesses.find`."""
        return await asyncio.to_thread(self._find, triton_name)

    async def end(self, pids: Sequence[int]) -> None:
        """See `ModelProcesses.end`."""
        _send(pids, signal.SIGKILL)
        if not await self._wait_for_end(pids, END_LOOKS):
            raise Unavailable(f"processes that were ended are still there: {sorted(pids)}")

    async def memory_bytes(self, pids: Sequence[int]) -> int:
        """See `ModelProcesses.memory_bytes`."""
        return await asyncio.to_thread(lambda: self._sum(ProcessTable.read(self._proc).family(pids)))

    async def family(self, pids: Sequence[int]) -> Sequence[int]:
        """See `ModelProcesses.family`."""
        return await asyncio.to_thread(lambda: sorted(ProcessTable.read(self._proc).family(pids)))

    async def server(self, models: Collection[str]) -> ServerMemory | None:
        """See `ModelProcesses.server`."""
        return await asyncio.to_thread(self._server, models)

    async def end_server(self, pid: int, patience_ms: int) -> None:
        """See `ModelProcesses.end_server`."""
        table = await asyncio.to_thread(ProcessTable.read, self._proc)
        others = (table.family([pid]) | table.group(pid)) - {pid}
        _send([pid], signal.SIGTERM)
        if not await self._wait_for_end([pid], max(1, round(patience_ms / 1000 / END_LOOK_S))):
            await self.end([pid])
        await self.end(sorted(others))

    def _find(self, triton_name: str) -> list[int] | None:
        table = ProcessTable.read(self._proc)
        servers = self._servers(table)
        return None if not servers else [each.pid for each in _stubs(table, servers, triton_name)]

    def _server(self, models: Collection[str]) -> ServerMemory | None:
        table = ProcessTable.read(self._proc)
        servers = self._servers(table)
        if len(servers) != 1:
            return None
        pid = servers[0]
        of_models = {each.pid for name in models for each in _stubs(table, servers, name)}
        beside = (table.family([pid]) | table.group(pid)) - table.family(of_models)
        return ServerMemory(pid, self._sum(beside))

    def _servers(self, table: ProcessTable) -> list[int]:
        return [
            each.pid
            for each in table.processes.values()
            if each.command[0].endswith(b"tritonserver") and self._option in each.command
        ]

    def _sum(self, pids: Iterable[int]) -> int:
        return sum(own_bytes(pid, self._proc) for pid in pids)

    async def _wait_for_end(self, pids: Sequence[int], looks: int) -> bool:
        for _ in range(looks):
            if not await asyncio.to_thread(lambda: any(runs(pid, self._proc) for pid in pids)):
                return True
            await asyncio.sleep(END_LOOK_S)
        return False


def _stubs(table: ProcessTable, servers: Collection[int], triton_name: str) -> list[Process]:
    instance = re.compile(re.escape(triton_name.encode()) + rb"_\d+_\d+")
    return [
        each
        for each in table.processes.values()
        if each.command[0].endswith(_STUB) and each.parent in servers and any(map(instance.fullmatch, each.command))
    ]


def _send(pids: Iterable[int], signal_number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            try:
                os.kill(pid, signal_number)
            except PermissionError as error:
                raise Unavailable(f"the loader may not end process {pid}: run it as Triton's user") from error
