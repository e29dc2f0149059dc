"""One connection to a node: many gRPC calls with one request and a stream of answers each, over HTTP/2.

Why not grpc.aio: a message costs it 0.1 ms of CPU here, which for a stream of 32 tokens is more than everything else a
gateway does; here what arrives together is read together, and a message costs a few microseconds. It does only what
`InferenceNode.generate` needs: no TLS, no compression, no retries. Headers are decoded by the hpack library.
Invariant: a call's unread answers are bounded by its window, so a slow reader slows the node down and nothing else.
Source: RFC 9113 and the gRPC over HTTP/2 protocol description. Decision: docs/decisions/0095-token-stream.md.
"""

import asyncio
from collections import deque
from typing import cast
from urllib.parse import unquote

import hpack
import structlog

from services.gateway.adapters import http2_frames as h2
from services.gateway.adapters.node_call import (
    ANSWER_BYTES_MAX,
    INTERNAL,
    OK,
    UNAVAILABLE,
    UNKNOWN,
    WINDOW_BYTES,
    Call,
    CallFailed,
)

log = structlog.get_logger(__name__)

KEEPALIVE_S, KEEPALIVE_ANSWER_S = 10.0, 5.0  # a dead node is noticed within 15 s, as by `grpc_edge.open_channel`
CALL_TRIES_MAX, REFUSED_PAUSE_S = 6, 0.01  # guesses: 150 ms in all for a server that is at its limit of streams
STREAM_ID_MAX = 2**31 - 1 - 2**20  # then a new connection: ids are not used again
HEADER_BLOCKS_KEPT = 64  # distinct blocks of answers: a handful, unless nodes write ids into them


class NodeConnection(asyncio.Protocol):
    """See the module. Use `NodeConnection.open`."""

    def __init__(self, authority: str, path: str) -> None:
        self._transport: asyncio.Transport | None = None
        self._head = h2.header_block(
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path),
                (":authority", authority),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("user-agent", "roundhouse-gateway"),
            ]
        )
        self._calls: dict[int, Call] = {}
        self._next_stream = 1
        self._buffer = bytearray()
        self._block = bytearray()  # a header block that goes on in CONTINUATION frames
        self._block_stream, self._block_ends = 0, False
        self._headers = hpack.Decoder()
        self._headers.header_table_size = self._headers.max_allowed_table_size = 0
        self._known_blocks: dict[bytes, dict[str, str]] = {}
        self._received_bytes = 0  # not yet given back to the connection's window
        self._send_window = self._stream_window = h2.DEFAULT_WINDOW
        self._frame_bytes = h2.DEFAULT_FRAME_BYTES
        self._calls_max = h2.WINDOW_MAX
        self._unsent: deque[Call] = deque()
        self._room: deque[asyncio.Future[None]] = deque()
        self._closing = False  # takes no new call
        self._greeted = asyncio.Event()  # its settings have come, or never will
        self._heard = False
        self._timer: asyncio.TimerHandle | None = None
        self._ping_sent = False

    @classmethod
    async def open(cls, address: str, path: str, timeout_s: float) -> "NodeConnection":
        """Connect to `host:port` and wait for the node's settings, which limit calls. Raises OSError, TimeoutError,
        CallFailed."""
        host, _, port = address.rpartition(":")
        connection = cls(address, path)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().create_connection(lambda: connection, host.strip("[]"), int(port))
                await connection._greeted.wait()
        except BaseException:
            connection.close()
            raise
        if connection._closing:
            raise CallFailed(UNAVAILABLE, "the node hung up before it said anything")
        return connection

    @property
    def usable(self) -> bool:
        """Whether it takes new calls."""
        return not self._closing and self._next_stream < STREAM_ID_MAX

    def __len__(self) -> int:
        return len(self._calls)

    async def call(self, request: bytes, timeout_s: float) -> Call:
        """Begin a call, waiting while the node has as many as it takes. Raises CallFailed if the connection is gone."""
        while len(self._calls) >= self._calls_max and not self._closing:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._room.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                self._let_in()  # its place, if it was given one just now, is the next one's
                raise
        if self._closing:
            raise CallFailed(UNAVAILABLE, "the connection is gone")
        call = Call(self, h2.message(request), timeout_s)
        self._begin(call)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._keep_alive)
        return call

    def _begin(self, call: Call) -> None:
        if call.has_ended:
            return
        if self._closing:
            call.end(CallFailed(UNAVAILABLE, "the connection is gone"))
            return
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        call.begin(stream, self._stream_window)
        self._calls[stream] = call
        block = self._head + h2.header_block([("grpc-timeout", _timeout_text(call.remaining_s))])
        self._send(call, h2.frame(h2.HEADERS, h2.END_HEADERS, stream, block))

    def forget(self, call: Call, *, cancel: bool = False) -> None:
        """The call is over for us."""
        if self._calls.pop(call.stream, None) is None:
            return
        if cancel:
            self.write(h2.reset(call.stream, h2.CANCEL))
        self._let_in()
        if self._closing and not self._calls:
            self.close()

    def _let_in(self) -> None:
        while self._room and (self._closing or len(self._calls) < self._calls_max):
            waiter = self._room.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def write(self, data: bytes) -> None:
        """Send frames, if there still is somebody to send them to."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Hang up. Calls that run fail. Idempotent."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()
        self._end_all("the connection was closed")

    # Sending: the request, as far as the node's windows allow.

    def _send(self, call: Call, head: bytes) -> None:
        data = head + self._sendable(call)
        self.write(data)
        if call.unsent:
            self._unsent.append(call)

    def _sendable(self, call: Call) -> bytes:
        """DATA frames for what both windows let through; the last one ends our half of the stream."""
        frames: list[bytes] = []
        while call.unsent:
            size = min(len(call.unsent), self._frame_bytes, self._send_window, call.send_window)
            if size <= 0:
                break
            piece, call.unsent = bytes(call.unsent[:size]), call.unsent[size:]
            self._send_window -= size
            call.send_window -= size
            frames.append(h2.frame(h2.DATA, 0 if call.unsent else h2.END_STREAM, call.stream, piece))
        return b"".join(frames)

    def _send_more(self) -> None:
        """A window has grown."""
        for _ in range(len(self._unsent)):
            call = self._unsent.popleft()
            if call.stream in self._calls:
                self._send(call, b"")

    # Receiving.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet: no dynamic table, no pushes, our window for each call, and all there is for the connection."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        ours = h2.settings_frame(
            [
                (h2.SETTING_HEADER_TABLE_SIZE, 0),
                (h2.SETTING_ENABLE_PUSH, 0),
                (h2.SETTING_INITIAL_WINDOW_SIZE, WINDOW_BYTES),
            ]
        )
        self.write(h2.PREFACE + ours + h2.window_update(0, h2.WINDOW_MAX - h2.DEFAULT_WINDOW))

    def data_received(self, data: bytes) -> None:
        """Take every whole frame, then wake those who got something."""
        self._heard = True
        self._buffer += data
        touched: set[Call] = set()
        try:
            self._take_frames(touched)
        except Exception as error:  # noqa: BLE001 - whatever it was, this connection cannot be understood any more
            log.warning("node_connection_unreadable", error=type(error).__name__)
            self.close()
        for call in touched:
            call.wake()

    def _take_frames(self, touched: set[Call]) -> None:
        buffer, at = self._buffer, 0
        size = len(buffer)
        while size - at >= h2.HEADER_BYTES:
            length, kind, flags, stream = h2.frame_head(buffer, at)
            if length > h2.DEFAULT_FRAME_BYTES:
                raise ValueError("a frame is longer than we allowed")
            end = at + h2.HEADER_BYTES + length
            if end > size:
                break
            payload = bytes(buffer[at + h2.HEADER_BYTES : end])
            at = end
            if kind == h2.DATA:
                self._take_data(stream, flags, payload, touched)
            elif kind in (h2.HEADERS, h2.CONTINUATION):
                self._take_headers(kind, stream, flags, payload)
            else:
                self._take_control(kind, stream, flags, payload)
        del buffer[:at]

    def _take_data(self, stream: int, flags: int, payload: bytes, touched: set[Call]) -> None:
        self._received_bytes += len(payload)
        if self._received_bytes > h2.WINDOW_MAX // 2:
            self.write(h2.window_update(0, self._received_bytes))
            self._received_bytes = 0
        call = self._calls.get(stream)
        if call is None:
            return  # cancelled; what was on its way still comes
        call.take(h2.unpadded(payload, flags & h2.PADDED) if flags & h2.PADDED else payload)
        touched.add(call)
        if flags & h2.END_STREAM:
            self._over(call, CallFailed(INTERNAL, "the answer has no status"))

    def _take_headers(self, kind: int, stream: int, flags: int, payload: bytes) -> None:
        if kind == h2.HEADERS:
            self._block = bytearray(h2.unpadded(payload, flags))
            self._block_stream, self._block_ends = stream, bool(flags & h2.END_STREAM)
        else:
            if stream != self._block_stream or len(self._block) > ANSWER_BYTES_MAX:
                raise ValueError("a header block is continued wrongly")
            self._block += payload
        if not flags & h2.END_HEADERS:
            return
        headers = self._decoded(bytes(self._block))
        call = self._calls.get(self._block_stream)
        if call is None:
            return
        if self._block_ends:
            self._over(call, _failure_of(headers))
        elif headers.get(":status") not in ("200", None):
            self._over(call, CallFailed(UNAVAILABLE, "the node does not speak gRPC"))

    def _decoded(self, block: bytes) -> dict[str, str]:
        """The headers of a block. Without a dynamic table equal blocks mean the same, so each is decoded once."""
        headers = self._known_blocks.get(block)
        if headers is None:
            headers = {str(name): str(value) for name, value in self._headers.decode(block)}
            if len(self._known_blocks) < HEADER_BLOCKS_KEPT:
                self._known_blocks[block] = headers
        return headers

    def _over(self, call: Call, failure: CallFailed | None) -> None:
        call.end(failure)
        unsent = bool(call.unsent)
        self.forget(call, cancel=unsent)  # a node that answers early need not hear the rest

    def _take_control(self, kind: int, stream: int, flags: int, payload: bytes) -> None:
        if kind == h2.WINDOW_UPDATE:
            self._grow(stream, h2.uint32(payload))
        elif kind == h2.RST_STREAM:
            if (call := self._calls.get(stream)) is not None:
                self._was_reset(call, h2.uint32(payload))
        elif kind == h2.PING and not flags & h2.ACK:
            self.write(h2.frame(h2.PING, h2.ACK, 0, payload))
        elif kind == h2.SETTINGS and not flags & h2.ACK:
            self._obey(h2.settings_of(payload))
        elif kind == h2.GOAWAY:
            self._go_away(h2.uint32(payload))

    def _was_reset(self, call: Call, code: int) -> None:
        """A refused call was not begun (RFC 9113, 8.7): it is sent again: servers count a little late."""
        again = code == h2.REFUSED_STREAM and call.tries < CALL_TRIES_MAX
        if not again:
            call.end(CallFailed(UNAVAILABLE, f"the node reset the stream with code {code}"))
        self.forget(call)
        if again:
            asyncio.get_running_loop().call_later(REFUSED_PAUSE_S * call.tries, self._begin, call)

    def _grow(self, stream: int, octets: int) -> None:
        if stream == 0:
            self._send_window += octets
        elif (call := self._calls.get(stream)) is not None:
            call.send_window += octets
        self._send_more()

    def _obey(self, settings: list[tuple[int, int]]) -> None:
        for number, value in settings:
            if number == h2.SETTING_INITIAL_WINDOW_SIZE:
                for call in self._calls.values():
                    call.send_window += value - self._stream_window
                self._stream_window = value
            elif number == h2.SETTING_MAX_FRAME_SIZE:
                self._frame_bytes = value
            elif number == h2.SETTING_MAX_CONCURRENT_STREAMS:
                self._calls_max = value
        self.write(h2.frame(h2.SETTINGS, h2.ACK, 0))
        self._greeted.set()
        self._send_more()
        for _ in range(min(len(self._room), max(0, self._calls_max - len(self._calls)))):
            self._let_in()  # each lets one in

    def _go_away(self, last_stream: int) -> None:
        """The node takes no new call; those above `last_stream` it has not begun."""
        self._closing = True
        for call in [call for call in self._calls.values() if call.stream > last_stream]:
            call.end(CallFailed(UNAVAILABLE, "the node is going away"))
            self.forget(call)
        self._let_in()
        if not self._calls:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Every call fails."""
        self._closing = True
        self._end_all("the connection to the node was lost")

    def _end_all(self, why: str) -> None:
        self._greeted.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.end(CallFailed(UNAVAILABLE, why))
        while self._room:
            self._let_in()

    def _keep_alive(self) -> None:
        """Ask a silent node for a sign of life while calls run on it."""
        loop = asyncio.get_running_loop()
        if self._ping_sent and not self._heard:
            log.warning("node_silent")
            if self._transport is not None:
                self._transport.abort()
            self._timer = None
            return
        if not self._calls:
            self._timer, self._ping_sent = None, False
            return
        self._ping_sent = not self._heard
        if self._ping_sent:
            self.write(h2.frame(h2.PING, 0, 0, bytes(8)))
        self._heard = False
        self._timer = loop.call_later(KEEPALIVE_ANSWER_S if self._ping_sent else KEEPALIVE_S, self._keep_alive)


def _failure_of(trailers: dict[str, str]) -> CallFailed | None:
    """What the end of an answer says; None for OK."""
    text = trailers.get("grpc-status", "")
    status = int(text) if text.isdigit() else UNKNOWN
    return None if status == OK else CallFailed(status, unquote(trailers.get("grpc-message", "")))


def _timeout_text(seconds: float) -> str:
    """A deadline as gRPC writes it, at most 8 digits and never zero."""
    milliseconds = max(1, round(seconds * 1000))
    return f"{milliseconds}m" if milliseconds < 10**8 else f"{min(milliseconds // 1000, 10**8 - 1)}S"
