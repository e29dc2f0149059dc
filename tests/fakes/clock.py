"""A clock that tests move, and an event loop whose waits take no real time.

`VirtualClock` reads the virtual loop's time when one runs, so that `asyncio.timeout`, `sleep` and the clock agree.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

EPOCH_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z: any fixed start
Result = TypeVar("Result")


class ManualClock:
    """Stands still until told to move; `sleep_ms` moves it."""

    def __init__(self, now_ms: int = EPOCH_MS) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        """The set time."""
        return self._now_ms

    def monotonic_ms(self) -> int:
        """The set time: it never goes back."""
        return self._now_ms

    def advance(self, duration_ms: int) -> None:
        """Move forward."""
        assert duration_ms >= 0
        self._now_ms += duration_ms

    async def sleep_ms(self, duration_ms: int) -> None:
        """Move forward at once."""
        self.advance(duration_ms)
        await asyncio.sleep(0)


class VirtualClock:
    """The time of the virtual loop that is running."""

    def now_ms(self) -> int:
        """Epoch plus the loop's virtual time."""
        return EPOCH_MS + self.monotonic_ms()

    def monotonic_ms(self) -> int:
        """The loop's virtual time."""
        return round(asyncio.get_running_loop().time() * 1000)

    async def sleep_ms(self, duration_ms: int) -> None:
        """Wait in virtual time."""
        await asyncio.sleep(duration_ms / 1000)


class _InstantSelector(selectors.SelectSelector):
    """Instead of waiting for the next timer, moves the loop's time to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "the simulation waits for something that can never come"
            self.now_s += max(timeout, 0)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop in which an hour of waiting takes no time. No real I/O, no threads."""

    def __init__(self) -> None:
        self._instant = _InstantSelector()
        super().__init__(self._instant)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._instant.now_s


def run_virtual(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on a fresh virtual-time loop and return its result."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
