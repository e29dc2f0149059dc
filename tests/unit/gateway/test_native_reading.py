"""The patience of the native API with callers who do not read. On virtual time."""

import asyncio
from typing import Any

import pytest

from roundhouse.wire.v1 import inference_pb2 as wire
from services.gateway.adapters.client_connection import STALL_S_MAX
from services.gateway.adapters.native_grpc import _write
from services.gateway.domain.outcomes import ClientLeft
from tests.fakes.clock import run_virtual


class Stalled:
    """A call whose caller takes nothing after the first message."""

    def __init__(self) -> None:
        self.taken = 0

    async def write(self, _: Any) -> None:
        """Take one, then wait for ever."""
        if self.taken:
            await asyncio.Event().wait()
        self.taken += 1


def test_a_caller_who_stops_reading_counts_as_gone() -> None:
    """Case B32 (b): the first message goes out; the next one is stuck, and after 30 s the request ends."""

    async def scenario() -> None:
        call = Stalled()
        await _write(call, wire.GenerateResponse())
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(ClientLeft):
            await _write(call, wire.GenerateResponse())
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(STALL_S_MAX)

    run_virtual(scenario())


def test_a_cancelled_call_is_a_cancellation() -> None:
    """Case B32 (a): the caller's cancellation is not taken for its stalling."""

    async def scenario() -> None:
        call = Stalled()
        await _write(call, wire.GenerateResponse())
        task = asyncio.create_task(_write(call, wire.GenerateResponse()))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(scenario())
