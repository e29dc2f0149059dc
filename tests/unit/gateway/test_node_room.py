"""Who waits while a node has as many streams as it takes: none is forgotten. No server: frames are made by hand."""

import asyncio
from typing import Any

from services.gateway.adapters import http2_frames as h2
from services.gateway.adapters.node_connection import NodeConnection


class Wire(asyncio.Transport):
    """Takes everything and says nothing."""

    def write(self, data: Any) -> None:
        """Gone."""

    def is_closing(self) -> bool:
        """Never."""
        return False

    def close(self) -> None:
        """Nothing to close."""


def connected(streams: int) -> NodeConnection:
    """A connection to a node that takes so many streams."""
    connection = NodeConnection("node:1", "/m")
    connection.connection_made(Wire())
    allow(connection, streams)
    return connection


def allow(connection: NodeConnection, streams: int) -> None:
    """The node says how many streams it takes from now on."""
    connection.data_received(h2.settings_frame([(h2.SETTING_MAX_CONCURRENT_STREAMS, streams)]))


async def turns() -> None:
    """Let everybody who can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_place_of_one_who_left_as_it_was_called_goes_to_the_next() -> None:
    """One stream at a time: the second in line is let in and leaves in the same moment; the third is not left waiting
    for an end that never comes, since nothing runs."""
    connection = connected(1)
    running = await connection.call(b"", 60)
    second = asyncio.ensure_future(connection.call(b"", 60))
    third = asyncio.ensure_future(connection.call(b"", 60))
    await turns()
    running.cancel()
    second.cancel()
    await turns()
    assert second.cancelled()
    assert third.done()
    third.result().cancel()
    connection.close()


async def test_a_node_that_takes_more_lets_all_in_that_it_has_room_for() -> None:
    """Three wait behind one; the node now takes three: two come in at once, and the last when one has ended."""
    connection = connected(1)
    running = await connection.call(b"", 60)
    waiting = [asyncio.ensure_future(connection.call(b"", 60)) for _ in range(3)]
    await turns()
    allow(connection, 3)
    await turns()
    assert [call.done() for call in waiting] == [True, True, False]
    running.cancel()
    await turns()
    assert all(call.done() for call in waiting)
    connection.close()
