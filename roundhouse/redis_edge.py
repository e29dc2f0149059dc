"""The edge to Valkey or Redis: one bounded connection pool, and Lua scripts called by hash.

A script is one atomic decision. It is sent by hash and sent whole only when the server does not know it (first use,
SCRIPT FLUSH, failover). Library errors become `Unavailable`. A cancelled call closes its connection instead of leaving
its reply to the next caller (redis-py `disconnect_on_error`; case B37).
"""

import asyncio
from collections.abc import Sequence
from hashlib import sha1
from importlib import resources
from typing import Any, cast

from redis.asyncio import BlockingConnectionPool, Redis
from redis.exceptions import NoScriptError, RedisError

from roundhouse.errors import Unavailable

CONNECTIONS_MAX = 32  # a guess: enough to pipeline a busy process, few enough for hundreds of processes a server
CALL_TIMEOUT_S = 2.0
CONNECT_TIMEOUT_S = 2.0

ScriptCall = tuple[Sequence[str], Sequence[str | bytes | int | float]]
"""Keys and arguments of one script run."""


def open_redis(url: str, *, connections_max: int = CONNECTIONS_MAX) -> Redis:
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
    return Redis.from_pool(pool)  # owns the pool: closing the client closes its connections


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

    async def each(self, redis: Redis, calls: Sequence[ScriptCall]) -> list[Any]:
        """Run it once for each call, in one round trip; each is atomic by itself, not all together.

        Raises Unavailable if any failed; the others may have taken effect."""
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

    async def _pipelined(self, redis: Redis, calls: Sequence[ScriptCall]) -> list[Any]:
        async with redis.pipeline(transaction=False) as pipeline:
            for keys, arguments in calls:
                values: list[Any] = [*keys, *arguments]
                pipeline.evalsha(self._sha, len(keys), *values)
            return list(await pipeline.execute(raise_on_error=False))


def _cancellations() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task else 0


def _raise_swallowed(before: int) -> None:
    """Raise a cancellation that came during the call and that the client library lost (redis-py 7.4 sometimes does).

    Without this a loop that calls scripts would run on after its only cancellation, and its process would not stop."""
    if _cancellations() > before:
        raise asyncio.CancelledError
