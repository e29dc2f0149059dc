"""What is written in one turn of the loop leaves at once, in order, and before the end."""

import asyncio
from typing import Any, cast

from roundhouse.http_server import GATHERED_BYTES_MAX, GatheredWrites


class Written:
    """A transport that remembers what it was told."""

    def __init__(self) -> None:
        self.calls: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        """Keep it."""
        self.calls.append(data)

    def close(self) -> None:
        """Keep that, too."""
        self.calls.append("closed")

    def abort(self) -> None:
        """And this."""
        self.calls.append("aborted")

    def is_closing(self) -> bool:
        """Whether it was told to end."""
        return "closed" in self.calls

    def __getattr__(self, name: str) -> Any:
        return lambda *_: name


def gathered() -> tuple[Written, GatheredWrites]:
    """The layer over a transport."""
    written = Written()
    return written, GatheredWrites(cast("asyncio.Transport", written), asyncio.get_running_loop())


async def test_a_head_and_its_body_leave_together() -> None:
    """Two writes in one turn are one; a later one is another."""
    written, gathering = gathered()
    gathering.write(b"head ")
    gathering.write(b"body")
    assert written.calls == []
    await asyncio.sleep(0)
    assert written.calls == [b"head body"]
    gathering.write(b"more")
    await asyncio.sleep(0)
    assert written.calls == [b"head body", b"more"]


async def test_closing_sends_what_waits_first() -> None:
    """Nothing is lost at the end, and nothing is written after it."""
    written, gathering = gathered()
    gathering.write(b"last")
    gathering.close()
    await asyncio.sleep(0)
    assert written.calls == [b"last", "closed"]
    gathering.write(b"x")
    gathering.abort()
    assert written.calls[2:] == ["aborted"]


async def test_much_is_not_held_back() -> None:
    """Above the high-water mark the transport gets it at once, so that it can have the writer pause."""
    written, gathering = gathered()
    for _ in range(3):
        gathering.write(b"x" * (GATHERED_BYTES_MAX // 2))
    assert b"".join(cast("list[bytes]", written.calls)) == b"x" * (GATHERED_BYTES_MAX // 2 * 3)
    assert gathering.get_extra_info("peername") == "get_extra_info", "all else is the transport's own"
