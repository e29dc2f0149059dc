"""A client of a Redis Cluster that looks like redis-py's client of one server, for commands with one key.

Why not redis-py's own cluster client (7.4): after it has learned the table again it sends to nodes that it does not
close, still takes a demoted node for a primary, and opens a connection for every call of a burst. Here each node has
redis-py's ordinary client with its bounded pool, and what is ours is only where a command goes (`cluster_map.py`).
What it does not do: commands over several keys, pipelines, transactions; those are scripts. Invariant: a command is
sent again only if the node that got it said that it did not run it. Decision: docs/decisions/0130-redis-cluster.md.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import AskError, ClusterDownError, MovedError, RedisError, ResponseError
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import TimeoutError as TooLate

from roundhouse.cluster_channel import ClusterChannel
from roundhouse.cluster_map import REDIRECTS_MOST, ClusterMap, named, slot_of
from roundhouse.script_channel import ChannelLost, Server, Value

_KEYLESS = ("PING", "TIME")
_SCRIPTS = ("EVAL", "EVALSHA")

Connect = Callable[[Server], Redis]
"""A client of one node."""


class MeshCluster(Redis):
    """See the module. Close with `aclose()`."""

    scripts: ClusterChannel | None = None

    def __init__(self, seeds: Sequence[Server], connect: Connect, *, timeouts_s: tuple[float, float] | None) -> None:
        """`timeouts_s`: of calls and of connecting, for a channel that scripts share; None = without such a channel."""
        super().__init__()  # a pool that never connects: every command is sent by the client of a node
        self._connect = connect
        self._clients: dict[Server, Redis] = {}
        self._map = ClusterMap(seeds, self._slots)
        if timeouts_s is not None:
            self.scripts = ClusterChannel(self._map, timeout_s=timeouts_s[0], connect_timeout_s=timeouts_s[1])

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """As redis-py's. Raises RedisError."""
        try:
            if args[0] in _KEYLESS:
                return await self._of_any(args, options)
            return await self._of_owner(slot_of(_first_key(args)), args, options)
        except ChannelLost as error:
            raise NotConnected(str(error)) from error

    async def _of_any(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The answer of the first primary that has one: with one shard away, the others still serve."""
        problem: Exception = NotConnected("the cluster has no primary")
        for server in await self._map.primaries():
            try:
                return await self._client(server).execute_command(*args, **options)
            except (NotConnected, TooLate) as error:
                problem = error
        self._map.doubt()
        raise problem

    async def _of_owner(self, slot: int, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        for _ in range(REDIRECTS_MOST + 1):
            owner = await self._map.owner(slot)
            try:
                return await self._client(owner).execute_command(*args, **options)
            except MovedError as error:
                self._map.moved(slot, error.host, error.port, owner)
            except AskError as error:
                if args[0] in _SCRIPTS:  # see cluster_channel.py
                    raise
                return await self._asking(named(error.host, error.port, owner), args, options)
            except (NotConnected, TooLate, ClusterDownError):
                self._map.doubt()
                raise
        raise ResponseError("the nodes of the cluster do not agree who has this key")

    async def _asking(self, server: Server, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """One key of a slot that is on its way: at the node that it goes to."""
        async with self._client(server).client() as single:
            await single.execute_command("ASKING")
            return await single.execute_command(*args, **options)

    async def _slots(self, server: Server) -> Any:
        return await self._client(server).execute_command("CLUSTER SLOTS")

    def _client(self, server: Server) -> Any:
        """redis-py's `execute_command` has no types."""
        client = self._clients.get(server)
        if client is None:
            client = self._clients[server] = self._connect(server)
        return client

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close all. Idempotent."""
        await self._map.close()
        if self.scripts is not None:
            await self.scripts.close()
        clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            await client.aclose()
        await super().aclose(close_connection_pool)


def _first_key(args: tuple[Any, ...]) -> Value:
    if args[0] in _SCRIPTS:
        return cast("Value", args[3])
    if len(args) < 2:
        raise RedisError(f"{args[0]} names no key: it cannot be sent to a cluster")
    return cast("Value", args[1])
