"""Script channels to the nodes of a Redis Cluster: a script goes to the node that holds its keys.

Every script names a key first, and all its keys have one hash tag, so the first key tells the slot. ASK is not
followed. It means that a slot moves key by key, and our scripts make key names from their first key: between two nodes
they would see half of the data. They fail until the slot has arrived; a slot that is moved atomically (Valkey 9) never
says ASK.
Invariant: a script runs where all its keys are, or nowhere. Decision: docs/decisions/0130-redis-cluster.md.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import hiredis

from roundhouse.cluster_map import REDIRECTS_MOST, ClusterMap, slot_of
from roundhouse.script_channel import ChannelLost, ScriptChannel, Server, Value

_FIRST_KEY = 3  # EVALSHA digest count KEY
_NOT_NOW = ("ASK ", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "READONLY")


class ClusterChannel:
    """Has the calls of `ScriptChannel`, for EVAL and EVALSHA with at least one key."""

    def __init__(self, cluster: ClusterMap, *, timeout_s: float, connect_timeout_s: float) -> None:
        self._map = cluster
        self._timeouts = (timeout_s, connect_timeout_s)
        self._channels: dict[Server, ScriptChannel] = {}

    async def call(self, *command: Value) -> Any:
        """The reply; errors of the server are hiredis.ReplyError values. Raises ChannelLost, OSError, TimeoutError.

        A cancelled call may take effect; its reply is dropped."""
        slot = slot_of(command[_FIRST_KEY])
        reply: Any = None
        for _ in range(REDIRECTS_MOST + 1):
            owner = await self._map.owner(slot)
            reply = await self._ask(owner, slot, command)
            if not isinstance(reply, hiredis.ReplyError):
                return reply
            word, *where = str(reply).split(" ")
            if word != "MOVED":
                if str(reply).startswith(_NOT_NOW):
                    self._map.doubt()
                return reply
            host, _, port = where[1].rpartition(":")
            self._map.moved(slot, host, int(port), owner)
        return reply

    async def _ask(self, owner: Server, slot: int, command: tuple[Value, ...]) -> Any:
        try:
            return await self._channel(owner).call(*command)
        except ConnectionRefusedError:  # nothing was sent: somebody else may have the slot by now
            await self._map.learn()
            if (successor := await self._map.owner(slot)) == owner:
                raise
            return await self._channel(successor).call(*command)
        except (ChannelLost, OSError, TimeoutError):
            self._map.doubt()
            raise

    async def call_each(self, commands: Sequence[tuple[Value, ...]]) -> list[Any]:
        """The replies to several commands, each from its own node. Raises as `call`, when all have ended."""
        replies = await asyncio.gather(*[self.call(*command) for command in commands], return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, hiredis.ReplyError):
                raise reply
        return replies

    async def close(self) -> None:
        """Hang up. Idempotent; a later call connects again."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    def _channel(self, server: Server) -> ScriptChannel:
        channel = self._channels.get(server)
        if channel is None:
            timeout_s, connect_timeout_s = self._timeouts
            channel = ScriptChannel(server, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s)
            self._channels[server] = channel
        return channel
