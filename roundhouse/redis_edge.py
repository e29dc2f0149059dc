"""The edge to Valkey or Redis: one bounded connection pool, and Lua scripts called by hash.

A script is one atomic decision. It is sent by hash and sent whole only when the server does not know it (first use,
SCRIPT FLUSH, failover). Library errors become `Unavailable`. A cancelled call never leaves its reply to the next caller
(case B37): scripts share a channel that knows whose each reply is; every other command has a connection of the pool
for itself, which redis-py closes when the call is cancelled.
"""

import asyncio
from collections.abc import Sequence
from hashlib import sha1
from importlib import resources
from typing import Any, cast

import hiredis
from redis.asyncio import BlockingConnectionPool, Connection, Redis
from redis.exceptions import NoScriptError, RedisError

from roundhouse.errors import Unavailable
from roundhouse.script_channel import ChannelLost, ScriptChannel, Server, Value

CONNECTIONS_MAX = 32  # a guess: enough to pipeline a busy process, few enough for hundreds of processes a server
CALL_TIMEOUT_S = 2.0
CONNECT_TIMEOUT_S = 2.0

ScriptCall = tuple[Sequence[str], Sequence[str | bytes | int | float]]
"""Keys and arguments of one script run."""


def open_redis(url: str, *, connections_max: int = CONNECTIONS_MAX) -> "MeshRedis":
    """A client whose calls answer or fail within `CALL_TIMEOUT_S`; replies are bytes. Close with `aclose()`."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=connections_max,
        timeout=CALL_TIMEOUT_S,
        socket_timeout=CALL_TIMEOUT_S,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        health_check_interval=15,
        decode_responses=False,
    )
    redis = cast("MeshRedis", MeshRedis.from_pool(pool))  # owns the pool: closing the client closes its connections
    server = Server.of(pool.connection_kwargs) if pool.connection_class is Connection else None
    if server is not None:
        redis.scripts = ScriptChannel(server, timeout_s=CALL_TIMEOUT_S, connect_timeout_s=CONNECT_TIMEOUT_S)
    return redis


class MeshRedis(Redis):
    """redis-py's client, with a channel for scripts beside it where the server can be reached in plain TCP."""

    scripts: ScriptChannel | None = None

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close both."""
        if self.scripts is not None:
            await self.scripts.close()
        await super().aclose(close_connection_pool)


class LuaScript:
    """One script, kept as a `.lua` file beside the adapter that calls it."""

    def __init__(self, package: str, name: str, *, prelude: Sequence[str] = ()) -> None:
        """Read `name` from `package`; `prelude` names files put before it, for steps that several scripts share."""
        self.name = name
        files = [resources.files(package).joinpath(each) for each in (*prelude, name)]
        self._text = "\n".join(file.read_text() for file in files)
        self._sha = sha1(self._text.encode(), usedforsecurity=False).hexdigest()

    async def __call__(self, redis: Redis, keys: Sequence[str], arguments: Sequence[str | bytes | int | float]) -> Any:
        """Run it. Raises Unavailable when the server is away, slow or refuses (read-only replica, out of memory)."""
        if (channel := getattr(redis, "scripts", None)) is not None:
            return await self._over(channel, keys, arguments)
        values: list[Any] = [*keys, *arguments]
        cancellations = _cancellations()
        try:
            try:
                answer = await cast("Any", redis.evalsha(self._sha, len(keys), *values))
            except NoScriptError:
                answer = await cast("Any", redis.eval(self._text, len(keys), *values))
        except (RedisError, OSError, TimeoutError) as error:
            _raise_swallowed(cancellations)
            raise Unavailable(f"the store did not run {self.name}") from error
        _raise_swallowed(cancellations)
        return answer

    async def _over(self, channel: ScriptChannel, keys: Sequence[str], arguments: Sequence[Value]) -> Any:
        try:
            answer = await channel.call("EVALSHA", self._sha, len(keys), *keys, *arguments)
            if _is_unknown(answer):
                answer = await channel.call("EVAL", self._text, len(keys), *keys, *arguments)
        except (ChannelLost, OSError, TimeoutError) as error:
            raise Unavailable(f"the store did not run {self.name}") from error
        if isinstance(answer, hiredis.ReplyError):
            raise Unavailable(f"the store did not run {self.name}") from answer
        return answer

    async def each(self, redis: Redis, calls: Sequence[ScriptCall]) -> list[Any]:
        """Run it once for each call, in one round trip; each is atomic by itself, not all together.

        Raises Unavailable if any failed; the others may have taken effect."""
        if (channel := getattr(redis, "scripts", None)) is not None:
            return await self._each_over(channel, calls)
        try:
            answers = await self._pipelined(redis, calls)
            if any(isinstance(answer, NoScriptError) for answer in answers):
                await cast("Any", redis.script_load(self._text))
                answers = await self._pipelined(redis, calls)
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable(f"the store did not run {self.name}") from error
        for answer in answers:
            if isinstance(answer, Exception):
                raise Unavailable(f"the store did not run {self.name}") from answer
        return answers

    async def _each_over(self, channel: ScriptChannel, calls: Sequence[ScriptCall]) -> list[Any]:
        commands = [("EVALSHA", self._sha, len(keys), *keys, *arguments) for keys, arguments in calls]
        try:
            answers = await channel.call_each(commands)
            if any(map(_is_unknown, answers)):
                await channel.call("SCRIPT", "LOAD", self._text)
                answers = await channel.call_each(commands)
        except (ChannelLost, OSError, TimeoutError) as error:
            raise Unavailable(f"the store did not run {self.name}") from error
        for answer in answers:
            if isinstance(answer, hiredis.ReplyError):
                raise Unavailable(f"the store did not run {self.name}") from answer
        return answers

    async def _pipelined(self, redis: Redis, calls: Sequence[ScriptCall]) -> list[Any]:
        async with redis.pipeline(transaction=False) as pipeline:
            for keys, arguments in calls:
                values: list[Any] = [*keys, *arguments]
                pipeline.evalsha(self._sha, len(keys), *values)
            return list(await pipeline.execute(raise_on_error=False))


def _is_unknown(answer: Any) -> bool:
    return isinstance(answer, hiredis.ReplyError) and str(answer).startswith("NOSCRIPT")


def _cancellations() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task else 0


def _raise_swallowed(before: int) -> None:
    """Raise a cancellation that came during the call and that the client library lost (redis-py 7.4 sometimes does).

    Without this a loop that calls scripts would run on after its only cancellation, and its process would not stop."""
    if _cancellations() > before:
        raise asyncio.CancelledError
