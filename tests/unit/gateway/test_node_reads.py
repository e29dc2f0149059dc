"""When a node's connection rests between reads: engines make tokens in steps, one for every stream at once."""

import asyncio
from typing import cast

from services.gateway.adapters import http2_frames as h2
from services.gateway.adapters.node_connection import DENSE_S, REST_S, NodeConnection
from tests.fakes.clock import run_virtual

NOTHING = h2.frame(h2.PING, h2.ACK, 0, bytes(8))


class Socket:
    """A transport that counts pauses."""

    def __init__(self) -> None:
        self.pauses = self.resumptions = 0

    def write(self, data: bytes) -> None:
        """Taken."""

    def is_closing(self) -> bool:
        """It stays."""
        return False

    def pause_reading(self) -> None:
        """Rest."""
        self.pauses += 1

    def resume_reading(self) -> None:
        """Go on."""
        self.resumptions += 1


def test_reads_that_follow_closely_are_followed_by_a_rest() -> None:
    """Two reads 0.1 ms apart: a rest of 1 ms, in which what comes gathers; what was read is not kept back."""

    async def scenario() -> None:
        socket, connection = Socket(), NodeConnection("n:1", "/m")
        connection.connection_made(cast("asyncio.Transport", socket))
        connection.data_received(NOTHING)
        assert (socket.pauses, socket.resumptions) == (0, 0)
        await asyncio.sleep(DENSE_S / 5)
        connection.data_received(NOTHING)
        assert (socket.pauses, socket.resumptions) == (1, 0)
        await asyncio.sleep(REST_S * 1.01)
        assert (socket.pauses, socket.resumptions) == (1, 1)

    run_virtual(scenario())


def test_one_stream_never_rests() -> None:
    """A token every 10 ms, as one stream of a real engine: each is read when it comes."""

    async def scenario() -> None:
        socket, connection = Socket(), NodeConnection("n:1", "/m")
        connection.connection_made(cast("asyncio.Transport", socket))
        for _ in range(100):
            await asyncio.sleep(0.01)
            connection.data_received(NOTHING)
        assert socket.pauses == 0

    run_virtual(scenario())
