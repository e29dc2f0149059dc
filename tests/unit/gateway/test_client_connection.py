"""Work that ends when its client leaves, or reads nothing for too long. On virtual time."""

import asyncio
from typing import Any

import pytest

from services.gateway.adapters.client_connection import STALL_S_MAX, Sender, while_connected
from tests.fakes.clock import run_virtual


async def stays() -> dict[str, Any]:
    """A client that never says anything more."""
    await asyncio.Event().wait()
    raise AssertionError("it never does")


async def leaves() -> dict[str, Any]:
    """A client that leaves after a second."""
    await asyncio.sleep(1)
    return {"type": "http.disconnect"}


async def taken(_: Any) -> None:
    """A client that reads at once."""


async def stuck(_: Any) -> None:
    """A client that reads nothing."""
    await asyncio.Event().wait()


def test_a_reader_that_is_stuck_is_cut() -> None:
    """Case B32 (b): after 30 s to 60 s on one piece the work is cancelled, and that is no error."""

    async def scenario() -> None:
        sender, loop = Sender(stuck), asyncio.get_running_loop()
        began = loop.time()
        await while_connected(stays, sender.body(b"x"), sender)
        assert STALL_S_MAX <= loop.time() - began <= 2 * STALL_S_MAX

    run_virtual(scenario())


def test_a_slow_reader_is_not_cut() -> None:
    """Each piece takes 20 s, ten of them: 200 s, and all are taken."""

    async def slowly(_: Any) -> None:
        await asyncio.sleep(20)

    async def scenario() -> None:
        sender = Sender(slowly)
        pieces = 0

        async def work() -> None:
            nonlocal pieces
            for _ in range(10):
                await sender.body(b"x")
                pieces += 1

        await while_connected(stays, work(), sender)
        assert pieces == 10

    run_virtual(scenario())


def test_a_departure_cancels_the_work_once_and_waits_for_its_clean_up() -> None:
    """The clean-up of two seconds ends although the client is gone; the caller goes on as if nothing had been."""

    async def scenario() -> None:
        sender, cleaned = Sender(taken), []

        async def work() -> None:
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(2)
                cleaned.append(asyncio.get_running_loop().time())

        await while_connected(leaves, work(), sender)
        assert len(cleaned) == 1
        await asyncio.sleep(0)  # the cancellation is over
        task = asyncio.current_task()
        assert task is not None
        assert task.cancelling() == 0

    run_virtual(scenario())


def test_a_cancellation_from_outside_is_passed_on() -> None:
    """Whoever stops the process is not taken for the client."""

    async def scenario() -> None:
        sender = Sender(taken)
        task = asyncio.create_task(while_connected(stays, asyncio.sleep(100), sender))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(scenario())


def test_an_error_of_the_work_is_raised() -> None:
    """It is not swallowed with the watching."""

    async def fails() -> None:
        raise ValueError

    async def scenario() -> None:
        with pytest.raises(ValueError):
            await while_connected(stays, fails(), Sender(taken))

    run_virtual(scenario())
