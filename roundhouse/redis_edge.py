"""The edge to Valkey or Redis: one bounded connection pool, and Lua scripts called by hash.

A script is one atomic decision. It is sent by hash and sent whole only when the server does not know it (first use,
SCRIPT FLUSH, failover). Library errors become `Unavailable`. A cancelled call never leaves its reply to the next caller
(case B37): scripts share a channel that knows whose each reply is; every other command has a connection of the pool
for itself, which redis-py closes when the call is cancelled. `redis+cluster://` names a Redis Cluster: keys that belong
together have one hash tag, and every command goes to the node of its first key (`redis_cluster.py`).
"""

import asyncio
from collections.abc import Sequence
from hashlib import sha1
from importlib import resources
from typing import Any, Final, cast

import hiredis
from redis.asyncio import BlockingConnectionPool, Connection, Redis
from redis.asyncio.connection import parse_url
from redis.exceptions import NoScriptError, RedisError

from roundhouse.cluster_channel import ClusterChannel
from roundhouse.errors import InvalidInput, Unavailable
from roundhouse.redis_cluster import MeshCluster
from roundhouse.script_channel import ChannelLost, ScriptChannel, Server, Value

CONNECTIONS_MAX = 32  # a guess: enough to pipeline a busy process, few enough for hundreds of processes a server
CALL_TIMEOUT_S = 2.0
CONNECT_TIMEOUT_S = 2.0
CLUSTER_SCHEMES = {"redis+cluster": "redis", "rediss+cluster": "rediss"}
_TIMES: Final[dict[str, Any]] = {
    "timeout": CALL_TIMEOUT_S,
    "socket_timeout": CALL_TIMEOUT_S,
    "socket_connect_timeout": CONNECT_TIMEOUT_S,
    "health_check_interval": 15,
    "decode_responses": False,
}

Channel = ScriptChannel | ClusterChannel
ScriptCall = tuple[Sequence[str], Sequence[str | bytes | int | float]]
"""Keys and arguments of one script run."""


def open_redis(url: str, *, connections_max: int = CONNECTIONS_MAX) -> "MeshRedis":
    """A client whose calls answer or fail within `CALL_TIMEOUT_S`; replies are bytes. Close with `aclose()`.

    `url`: `redis://`, `rediss://` or `unix://` as redis-py takes them, or `redis+cluster://[user:password@]host:port,…`
    (`rediss+cluster://` with TLS) with some nodes of a cluster. Raises InvalidInput if it is none of them."""
    if url.partition("://")[0] in CLUSTER_SCHEMES:
        return cast("MeshRedis", _open_cluster(url, connections_max))
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=connections_max,
        **_TIMES,
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


def _open_cluster(url: str, connections_max: int) -> MeshCluster:
    scheme, _, rest = url.partition("://")
    place, mark, query = rest.partition("?")
    login, at, hosts = place.rpartition("@")
    hosts, _, database = hosts.partition("/")
    if not all(hosts.split(",")) or database not in ("", "0"):
        raise InvalidInput(f"{scheme}:// wants host:port,host:port and no database", param="redis_url")
    start, end = f"{CLUSTER_SCHEMES[scheme]}://{login}{at}", f"{mark}{query}"
    try:
        nodes = [cast("dict[str, Any]", parse_url(f"{start}{host}{end}")) for host in hosts.split(",")]
    except ValueError as error:
        raise InvalidInput(f"{scheme}:// wants host:port,host:port: {error}", param="redis_url") from error

    def connect(server: Server) -> Redis:
        options = {**nodes[0], "host": server.host, "port": server.port}
        return Redis.from_pool(BlockingConnectionPool(max_connections=connections_max, **_TIMES, **options))

    seeds = [server for node in nodes if (server := Server.of(node)) is not None]
    plain = scheme == "redis+cluster"
    return MeshCluster(seeds, connect, timeouts_s=(CALL_TIMEOUT_S, CONNECT_TIMEOUT_S) if plain else None)


class LuaScript:
    """One script, kept as a `.lua` file beside the adapter that calls it."""

    def __init__(self, package: str, name: str, *, prelude: Sequence[str] = (), patient: bool = False) -> None:
        """Read `name` from `package`; `prelude` names files put before it, for steps that several scripts share.

        A `patient` script is one that nobody waits for: it may leave a moment later, with others."""
        self._patient = patient
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

    async def _over(
        self, channel: ScriptChannel | ClusterChannel, keys: Sequence[str], arguments: Sequence[Value]
    ) -> Any:
        call = channel.call_patiently if self._patient and isinstance(channel, ScriptChannel) else channel.call
        try:
            answer = await call("EVALSHA", self._sha, len(keys), *keys, *arguments)
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
            answers = await self._pipelined(redis, calls, whole=False)
            unknown = [index for index, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
            again = await self._pipelined(redis, [calls[index] for index in unknown], whole=True) if unknown else []
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable(f"the store did not run {self.name}") from error
        for index, answer in zip(unknown, again, strict=True):
            answers[index] = answer
        for answer in answers:
            if isinstance(answer, Exception):
                raise Unavailable(f"the store did not run {self.name}") from answer
        return answers

    async def _each_over(self, channel: Channel, calls: Sequence[ScriptCall]) -> list[Any]:
        commands = [("EVALSHA", self._sha, len(keys), *keys, *arguments) for keys, arguments in calls]
        try:
            answers = await channel.call_each(commands)
            unknown = [index for index, answer in enumerate(answers) if _is_unknown(answer)]
            again = [("EVAL", self._text, *commands[index][2:]) for index in unknown]
            for index, answer in zip(unknown, await channel.call_each(again), strict=True):
                answers[index] = answer
        except (ChannelLost, OSError, TimeoutError) as error:
            raise Unavailable(f"the store did not run {self.name}") from error
        for answer in answers:
            if isinstance(answer, hiredis.ReplyError):
                raise Unavailable(f"the store did not run {self.name}") from answer
        return answers

    async def _pipelined(self, redis: Redis, calls: Sequence[ScriptCall], *, whole: bool) -> list[Any]:
        script = self._text if whole else self._sha
        commands = [(script, len(keys), *keys, *arguments) for keys, arguments in calls]
        if isinstance(redis, MeshCluster):
            run = cast("Any", redis.eval if whole else redis.evalsha)
            return list(await asyncio.gather(*(run(*command) for command in commands), return_exceptions=True))
        async with redis.pipeline(transaction=False) as pipeline:
            for command in commands:
                cast("Any", pipeline.eval if whole else pipeline.evalsha)(*command)
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
