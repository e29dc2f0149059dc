"""Time as an interface: operations get a `Clock`, domain code gets `now_ms` as an argument.

`SystemClock` is the only reader of the machine's clocks; tests and the simulator pass a clock that they move.
"""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for records, monotonic time for durations, and waiting."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch (UTC)."""
        ...

    def monotonic_ms(self) -> int:
        """Milliseconds on a clock that never goes back; only differences mean anything."""
        ...

    async def sleep_ms(self, duration_ms: int) -> None:
        """Wait; ends early only by cancellation."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        """Milliseconds since the Unix epoch (UTC)."""
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        """Milliseconds of `CLOCK_MONOTONIC`."""
        return time.monotonic_ns() // 1_000_000

    async def sleep_ms(self, duration_ms: int) -> None:
        """Wait on the running event loop."""
        await asyncio.sleep(duration_ms / 1000)
