"""The virtual loop keeps the order and the length of waits without waiting."""

import asyncio
import time

from tests.fakes.clock import EPOCH_MS, VirtualClock, run_virtual


def test_an_hour_of_waiting_takes_no_time_and_keeps_order() -> None:
    """Timers fire in order of their virtual time, and the clock agrees with the loop."""
    clock = VirtualClock()
    order: list[tuple[str, int]] = []

    async def wait(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append((name, clock.now_ms() - EPOCH_MS))

    async def main() -> None:
        await asyncio.gather(wait("late", 3600), wait("early", 0.25))

    began = time.monotonic()
    run_virtual(main())
    assert order == [("early", 250), ("late", 3_600_000)]
    assert time.monotonic() - began < 60
