"""The demo's loud tenant, a client process of its own: its sixty connections must not delay the quiet one's clock.

`python -m roundhouse.cli.demo_loud` reads one JSON line (what to ask), says `ready`, waits for `go`, sends everything
at once, and writes the answers as one JSON line. The key comes on stdin, where no process list shows it.
"""

import asyncio
import sys

import msgspec

from roundhouse.cli.demo_requests import Answer, ask, open_client


class Errand(msgspec.Struct):
    """What to ask, and how often at once."""

    http_url: str
    key: str
    model: str
    prompt: str
    max_tokens: int
    count: int


class LoudTenant:
    """The client process. Use as an async context manager; leaving ends the process."""

    def __init__(self, errand: Errand) -> None:
        self._errand = errand
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> "LoudTenant":
        pipe = asyncio.subprocess.PIPE
        argv = [sys.executable, "-m", "roundhouse.cli.demo_loud"]
        self._process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, limit=2**22)
        await self._tell(msgspec.json.encode(self._errand) + b"\n")
        await self._hear()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None, "entered before"
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def go(self) -> None:
        """Send everything now."""
        await self._tell(b"go\n")

    async def answers(self) -> list[Answer]:
        """Wait for all answers."""
        return msgspec.json.decode(await self._hear(), type=list[Answer])

    async def _tell(self, line: bytes) -> None:
        assert self._process is not None, "entered before"
        assert self._process.stdin is not None, "a pipe was asked for"
        self._process.stdin.write(line)
        await self._process.stdin.drain()

    async def _hear(self) -> bytes:
        assert self._process is not None, "entered before"
        assert self._process.stdout is not None, "a pipe was asked for"
        return await self._process.stdout.readline()


async def _send_all(errand: Errand) -> list[Answer]:
    async with open_client(errand.http_url) as client:
        asked = (
            ask(client, errand.key, errand.model, errand.prompt, max_tokens=errand.max_tokens)
            for _ in range(errand.count)
        )
        return list(await asyncio.gather(*asked))


def main() -> None:
    """The client process: one errand, then the end."""
    errand = msgspec.json.decode(sys.stdin.readline(), type=Errand)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if sys.stdin.readline().strip() == "go":
        sys.stdout.write(msgspec.json.encode(asyncio.run(_send_all(errand))).decode() + "\n")


if __name__ == "__main__":
    main()
