"""One connection to Valkey or Redis that all script calls of a process share, answers in the order of the questions.

Why not redis-py for these: a call costs it 0.17 to 0.21 ms of CPU (a connection from the pool, a retry loop, a reader a
call), this one a fifth of that, and scripts are on the path of every request. It sends commands and reads replies, no
more: RESP2, parsed by hiredis. Invariant: every reply belongs to the oldest call without one, whoever has been
cancelled meanwhile, so a reply never reaches another caller (case B37). A server that is silent for `timeout_s` is hung
up on, and so is one that says READONLY, since behind its address there may be another primary by now; calls in flight
then fail and may have taken effect. Decision: docs/decisions/0096-script-channel.md.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import hiredis

Value = str | bytes | int | float
LINGER_S = 0.002  # a guess: some requests of a busy process, and less than a client needs to ask again
_NOTHING_YET = object()


class ChannelLost(Exception):
    """There is no connection, or it was lost while the call was in flight."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where the server is and how to log in."""

    host: str
    port: int
    database: int = 0
    username: str = ""
    password: str = ""

    @staticmethod
    def of(connection: Mapping[str, Any]) -> "Server | None":
        """From redis-py's arguments of a plain TCP connection; None if they name no host."""
        if "host" not in connection:
            return None
        return Server(
            str(connection["host"]),
            int(connection.get("port") or 6379),
            int(connection.get("db") or 0),
            connection.get("username") or "",
            connection.get("password") or "",
        )

    def greeting(self) -> list[tuple[Value, ...]]:
        """What to send first."""
        commands: list[tuple[Value, ...]] = []
        if self.password:
            commands.append(("AUTH", *([self.username] if self.username else []), self.password))
        if self.database:
            commands.append(("SELECT", self.database))
        return commands


class ScriptChannel:
    """See the module. Connects when first called and again after a loss."""

    def __init__(self, server: Server, *, timeout_s: float, connect_timeout_s: float) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._connection: _Connection | None = None
        self._opening: asyncio.Task[_Connection] | None = None

    async def call(self, *command: Value) -> Any:
        """The reply; errors of the server are hiredis.ReplyError values. Raises ChannelLost, OSError, TimeoutError.

        A cancelled call may take effect; its reply is dropped."""
        connection = self._connection
        if connection is None or connection.lost:
            connection = await self._opened()
        return await connection.call(command)

    async def call_patiently(self, *command: Value) -> Any:
        """As `call`, for what nobody waits for: it leaves with the next command, or after `LINGER_S`."""
        connection = self._connection
        if connection is None or connection.lost:
            connection = await self._opened()
        return await connection.call(command, patient=True)

    async def call_each(self, commands: Sequence[tuple[Value, ...]]) -> list[Any]:
        """The replies to several commands, sent together. Raises as `call`."""
        connection = self._connection
        if connection is None or connection.lost:
            connection = await self._opened()
        return list(await asyncio.gather(*[connection.call(command) for command in commands]))

    async def _opened(self) -> "_Connection":
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(self._was_opened)
        return await asyncio.shield(self._opening)

    def _was_opened(self, opening: "asyncio.Task[_Connection]") -> None:
        self._opening = None
        if not opening.cancelled() and opening.exception() is None:
            self._connection = opening.result()

    async def _open(self) -> "_Connection":
        connection = _Connection(self._timeout_s)
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                loop = asyncio.get_running_loop()
                await loop.create_connection(lambda: connection, self._server.host, self._server.port)
                for command in self._server.greeting():
                    if isinstance(reply := await connection.call(command), hiredis.ReplyError):
                        raise ChannelLost(f"the store does not let us in: {reply}")
        except BaseException:
            connection.hang_up()
            raise
        return connection

    async def close(self) -> None:
        """Hang up. Idempotent; a later call connects again."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait((self._opening,))
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.hang_up()
            await connection.ended.wait()


class _Connection(asyncio.Protocol):
    """One connection while it lives."""

    def __init__(self, timeout_s: float) -> None:
        self.lost = False
        self.ended = asyncio.Event()  # the socket is closed
        self._timeout_s = timeout_s
        self._transport: asyncio.Transport | None = None
        self._reader = hiredis.Reader(notEnoughData=_NOTHING_YET)
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._unsent: list[bytes] = []
        self._hurries = False  # `_send` runs in the next turn of the loop
        self._lingers: asyncio.TimerHandle | None = None  # `_send` runs when it rings, if nothing hurries before

    def call(self, command: tuple[Value, ...], *, patient: bool = False) -> "asyncio.Future[Any]":
        """Send a command. Commands of one turn of the loop leave in one write, with those that were patient before."""
        reply: asyncio.Future[Any] = self._loop.create_future()
        if self.lost:
            reply.set_exception(ChannelLost("the connection to the store was lost"))
            return reply
        now = self._loop.time()
        self._waiting.append((reply, now + self._timeout_s))
        if not patient and not self._hurries:
            self._hurries = True
            self._loop.call_soon(self._send)
        elif patient and not self._unsent:
            self._lingers = self._loop.call_later(LINGER_S, self._send)
        self._unsent.append(hiredis.pack_command(cast("Any", command)))  # its type says one element
        if self._timer is None:
            self._timer = self._loop.call_at(now + self._timeout_s, self._look_at_oldest)
        return reply

    def _send(self) -> None:
        if self._lingers is not None:
            self._lingers.cancel()  # else it would wake the process for nothing
            self._lingers = None
        data, self._unsent, self._hurries = b"".join(self._unsent), [], False
        if self._transport is not None and not self.lost:
            self._transport.write(data)

    def _look_at_oldest(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        ends_at = self._waiting[0][1]
        if self._loop.time() >= ends_at:
            self.hang_up()
        else:
            self._timer = self._loop.call_at(ends_at, self._look_at_oldest)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        """Hand replies to the oldest calls."""
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _NOTHING_YET:
                waiting, _ = self._waiting.popleft()
                if not waiting.done():
                    waiting.set_result(reply)
                if isinstance(reply, hiredis.ReplyError) and str(reply).startswith("READONLY"):
                    self.hang_up()  # it was made a replica: the next connection may find who took over
                    return
        except (hiredis.ProtocolError, IndexError):  # no reply, or one too many: nothing after it can be trusted
            self.hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """Calls in flight fail."""
        self.ended.set()
        self._fail()

    def hang_up(self) -> None:
        """End it. Calls in flight fail. Idempotent."""
        if self._transport is not None:
            self._transport.abort()
        self._fail()

    def _fail(self) -> None:
        self.lost = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            waiting, _ = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(ChannelLost("the connection to the store was lost"))
                waiting.exception()  # retrieved: its caller may have been cancelled
