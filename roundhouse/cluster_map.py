"""Which node of a Redis Cluster serves a slot, as far as this process knows.

The table is learned with CLUSTER SLOTS from whichever node answers. MOVED corrects it and makes us learn anew, and so
does every call that fails: after a failover the promoted replica is found within one call. It opens no connection and
sends nothing itself. Invariant: there is at most one question on its way, and a failing cluster is not asked more often
than every `LEARN_AGAIN_S`. Decision: docs/decisions/0130-redis-cluster.md.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import structlog
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import RedisError

from roundhouse.script_channel import ChannelLost, Server, Value

log = structlog.get_logger(__name__)

REDIRECTS_MOST = 3  # a guess: one for a failover, one for a table that was old, one to spare
LEARN_AGAIN_S = 0.1  # a guess

Ask = Callable[[Server], Awaitable[Any]]
"""Asks a node for CLUSTER SLOTS: the ranges as the protocol has them."""


class ClusterMap:
    """See the module. `listener` gets every node whenever the table was learned."""

    def __init__(self, seeds: Sequence[Server], ask: Ask) -> None:
        """`seeds`: nodes to ask when none is known or none of those answers."""
        assert seeds, "a cluster is found through one of its nodes"
        self._seeds = tuple(seeds)
        self._ask = ask
        self._owners: list[Server | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._nodes: tuple[Server, ...] = ()
        self._learning: asyncio.Task[None] | None = None
        self._learned_at = float("-inf")
        self._random = Random()  # noqa: S311 - only the order in which nodes are asked

    async def owner(self, slot: int) -> Server:
        """Who serves a slot. Raises ChannelLost if nobody does, or if nobody knows."""
        return self._owners[slot] or await self._found(slot)

    async def primaries(self) -> tuple[Server, ...]:
        """Every node with slots. Raises ChannelLost if nobody knows."""
        if not self._nodes:
            await self.learn()
        return tuple(dict.fromkeys(owner for owner in self._owners if owner is not None))

    def moved(self, slot: int, host: str, port: int, said_by: Server) -> None:
        """A node said that another has the slot."""
        self._owners[slot] = named(host, port, said_by)
        self.doubt()

    def doubt(self) -> None:
        """Learn the table anew, beside the calls."""
        if self._learning is None and asyncio.get_running_loop().time() - self._learned_at >= LEARN_AGAIN_S:
            self._begin_learning()

    async def learn(self) -> None:
        """Learn the table now. Raises ChannelLost if no node has one."""
        await asyncio.shield(self._learning or self._begin_learning())

    def is_known(self, server: Server) -> bool:
        """Whether it is one of the nodes, or one to ask."""
        return server in self._nodes or server in self._seeds

    async def close(self) -> None:
        """Ask no more. Idempotent."""
        if self._learning is not None:
            self._learning.cancel()
            await asyncio.wait((self._learning,))

    async def _found(self, slot: int) -> Server:
        await self.learn()
        owner = self._owners[slot]
        if owner is None:
            raise ChannelLost(f"no node of the cluster serves slot {slot}")
        return owner

    def _begin_learning(self) -> "asyncio.Task[None]":
        self._learning = asyncio.create_task(self._ask_around(), name="cluster_slots")
        self._learning.add_done_callback(self._has_learned)
        return self._learning

    def _has_learned(self, learning: "asyncio.Task[None]") -> None:
        self._learning = None
        self._learned_at = asyncio.get_running_loop().time()
        if not learning.cancelled() and (error := learning.exception()) is not None:
            log.warning("cluster_not_found", reason=str(error))

    async def _ask_around(self) -> None:
        """Take the table of the first node that has one. In random order: a node that was cut off knows an old one."""
        known = list(self._nodes)
        self._random.shuffle(known)
        reasons = []
        for server in dict.fromkeys([*known, *self._seeds]):
            try:
                ranges = await self._ask(server)
            except (ChannelLost, RedisError, OSError, TimeoutError) as error:
                reasons.append(f"{server.host}:{server.port}: {error or type(error).__name__}")
                continue
            if ranges:
                self._take(ranges, server)
                return
            reasons.append(f"{server.host}:{server.port}: it knows of no slots")
        raise ChannelLost("no node of the cluster answers: " + "; ".join(reasons))

    def _take(self, ranges: Iterable[Any], asked: Server) -> None:
        owners: list[Server | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        nodes: set[Server] = set()
        for first, last, *members in ranges:
            servers = [named((member[0] or b"").decode(), int(member[1]), asked) for member in members]
            owners[first : last + 1] = [servers[0]] * (last + 1 - first)
            nodes.update(servers)
        self._owners, self._nodes = owners, tuple(nodes)


def slot_of(key: Value) -> int:
    """The slot of a key."""
    return key_slot(key if isinstance(key, bytes) else str(key).encode())


def named(host: str, port: int, said_by: Server) -> Server:
    """A node as another names it; without a name it is where we asked (its address is not known to itself)."""
    return replace(said_by, host=host if host not in ("", "?") else said_by.host, port=port)
