"""The token stream's own HTTP/2 connection, against a real gRPC server."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from deploy.local.ports import free_ports
from services.gateway.adapters.node_call import (
    CANCELLED,
    DEADLINE_EXCEEDED,
    UNAVAILABLE,
    WINDOW_BYTES,
    Call,
    CallFailed,
)
from services.gateway.adapters.node_connection import NodeConnection
from tests.integration.gateway.running_gateway import until

METHOD = "/test.Streams/Run"
MESSAGE = b"x" * 1024


@dataclass
class Streams(grpc.GenericRpcHandler):  # type: ignore[misc,unused-ignore]  # untyped base in some releases
    """What a call does is its request: a word and a number."""

    sent: int = 0
    cancelled: int = 0
    running: int = 0
    most_running: int = 0
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    def service(self, handler_call_details: Any) -> Any:
        """One method."""
        return grpc.stream_stream_rpc_method_handler(self._run, None, None) if self else None

    async def _run(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            async for request in requests:
                word, _, number = request.partition(b" ")
                if word == b"size":
                    yield str(len(request)).encode()
                elif word == b"echo":
                    yield request
                elif word == b"fail":
                    await context.abort(grpc.StatusCode.NOT_FOUND, "no ä model")
                elif word == b"wait":
                    yield MESSAGE
                    await self.go_on.wait()
                else:
                    for _ in range(int(number)):
                        yield MESSAGE
                        self.sent += 1
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


@dataclass
class Peer:
    """A server and a connection to it."""

    streams: Streams
    server: Any
    connection: NodeConnection
    port: int

    async def call(self, request: bytes, timeout_s: float = 30) -> Call:
        """Begin a call."""
        return await self.connection.call(request, timeout_s)


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    """A server that takes ten streams at a time on a connection."""
    streams = Streams()
    options = [("grpc.max_concurrent_streams", 10), ("grpc.max_receive_message_length", 64 << 20)]
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((streams,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    connection = await NodeConnection.open(f"127.0.0.1:{port}", METHOD, 30)
    yield Peer(streams, server, connection, port)
    connection.close()
    await server.stop(0)


async def read_all(call: Call) -> list[bytes]:
    """Every message to the end."""
    messages: list[bytes] = []
    while more := await call.read():
        messages += more
    return messages


async def test_a_long_prompt_and_a_long_answer_pass_the_windows(peer: Peer) -> None:
    """3 MB there and back: many times the windows of 64 kB and 256 kB, and many frames."""
    request = b"echo " + bytes(range(256)) * 12_000
    assert await read_all(await peer.call(request)) == [request]
    assert len(peer.connection) == 0


async def test_more_calls_than_the_node_takes_wait_for_their_turn(peer: Peer) -> None:
    """60 calls of 20 messages on a connection that takes ten at a time: all complete."""

    async def one() -> int:
        return len(await read_all(await peer.call(b"send 20")))

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one()) for _ in range(60)]
    assert [task.result() for task in tasks] == [20] * 60
    assert peer.streams.most_running <= 10


async def test_a_reader_that_stops_stops_the_node(peer: Peer) -> None:
    """Case B32 (b): of 20 MB the node sends no more than the window and what gRPC itself keeps (guessed at 1 MB),
    another call is not held up, and nothing is lost when the reader comes back."""
    call = await peer.call(b"send 20000")
    await until(lambda: peer.streams.sent * len(MESSAGE) >= WINDOW_BYTES // 2, within_s=30)
    sent = -1
    while sent != peer.streams.sent:  # until it has stopped
        sent = peer.streams.sent
        await asyncio.sleep(0.3)
    assert sent * len(MESSAGE) < WINDOW_BYTES + (1 << 20)
    assert await read_all(await peer.call(b"echo hello")) == [b"echo hello"]
    assert len(await read_all(call)) == 20_000


async def test_a_cancelled_call_ends_on_the_node(peer: Peer) -> None:
    """Case B32 (a): the handler is cancelled, the reader told, other calls go on."""
    call = await peer.call(b"wait 1")
    assert await call.read() == [MESSAGE]
    call.cancel()
    await until(lambda: peer.streams.cancelled == 1, within_s=30)
    with pytest.raises(CallFailed) as raised:
        await call.read()
    assert raised.value.status == CANCELLED
    assert await read_all(await peer.call(b"size")) == [b"4"]


async def test_a_deadline_ends_a_call(peer: Peer) -> None:
    """Case B32 (c): after 200 ms both sides know."""
    call = await peer.call(b"wait 1", timeout_s=0.2)
    with pytest.raises(CallFailed) as raised:
        await read_all(call)
    assert raised.value.status == DEADLINE_EXCEEDED
    await until(lambda: peer.streams.running == 0, within_s=30)


async def test_a_status_comes_with_its_text(peer: Peer) -> None:
    """NOT_FOUND is 5; the text is percent-encoded on the wire."""
    with pytest.raises(CallFailed) as raised:
        await read_all(await peer.call(b"fail"))
    assert (raised.value.status, raised.value.details) == (5, "no ä model")


async def test_a_server_that_goes_away_lets_a_running_call_end_and_takes_no_more(peer: Peer) -> None:
    """GOAWAY: the connection is not usable for new calls; the running one gets its end."""
    call = await peer.call(b"wait 1")
    await call.read()
    stopping = asyncio.create_task(peer.server.stop(20))
    await until(lambda: not peer.connection.usable, within_s=30)
    with pytest.raises(CallFailed):
        await peer.call(b"size")
    peer.streams.go_on.set()
    assert await read_all(call) == []
    await stopping


async def test_a_lost_connection_fails_its_calls(peer: Peer) -> None:
    """The node is gone: every call hears so."""
    call = await peer.call(b"wait 1")
    await call.read()
    await peer.server.stop(0)
    with pytest.raises(CallFailed):
        await read_all(call)


async def test_what_does_not_speak_http2_is_not_connected_to() -> None:
    """An HTTP/1 server at the address."""

    def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    (port,) = free_ports(1)
    async with await asyncio.start_server(answer, "127.0.0.1", port):
        with pytest.raises(CallFailed) as raised:
            await NodeConnection.open(f"127.0.0.1:{port}", METHOD, 30)
        assert raised.value.status == UNAVAILABLE
