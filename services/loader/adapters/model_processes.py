"""The processes of Triton's Python backend, one stub a model instance, found by their command lines in /proc.

    triton_python_backend_stub MODEL_PY SHM_REGION … INSTANCE_NAME …      INSTANCE_NAME is `<model>_<group>_<number>`

Works where the loader shares Triton's process namespace (one host, or a pod that shares it); elsewhere it cannot tell
and says so. Source: Triton's python_backend, src/stub_launcher.cc.
"""

import asyncio
import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
_STUB = b"triton_python_backend_stub"
_KIB = 1024
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
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for _ in range(END_LOOKS):
            if not await asyncio.to_thread(lambda: any(self._runs(pid) for pid in pids)):
                return
            await asyncio.sleep(END_LOOK_S)

    async def memory_bytes(self, pids: Sequence[int]) -> int:
        """See `ModelProcesses.memory_bytes`."""
        return await asyncio.to_thread(lambda: sum(self._own_bytes(pid) for pid in pids))

    def _find(self, triton_name: str) -> list[int] | None:
        instance = re.compile(re.escape(triton_name.encode()) + rb"_\d+_\d+")
        commands = list(self._commands())
        servers = [pid for pid, words in commands if words[0].endswith(b"tritonserver") and self._option in words]
        if not servers:
            return None
        named = [pid for pid, words in commands if words[0].endswith(_STUB) and any(map(instance.fullmatch, words))]
        return [pid for pid in named if self._parent(pid) in servers]

    def _commands(self) -> Iterator[tuple[int, list[bytes]]]:
        for folder in self._proc.iterdir():
            if folder.name.isdigit():
                try:
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue  # it has ended
                if words[0]:
                    yield int(folder.name), words

    def _parent(self, pid: int) -> int:
        try:
            # `pid (name) state parent …`; the name may hold anything, also parentheses
            return int((self._proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            return 0

    def _runs(self, pid: int) -> bool:
        """Whether it still has memory: what waits for its parent to take notice has none."""
        try:
            return (self._proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
        except (OSError, IndexError):
            return False

    def _own_bytes(self, pid: int) -> int:
        """Anonymous memory, by its share: neither libraries nor what is mapped from the arena."""
        try:
            text = (self._proc / str(pid) / "smaps_rollup").read_text()
        except OSError:
            return 0
        found = re.search(r"^Pss_Anon:\s+(\d+) kB", text, re.MULTILINE)
        return int(found[1]) * _KIB if found else 0
