"""Erases what the kvstores hold of one tenant, on every node, and says what is left: nothing, or where it failed.

The salt is made here from the tenant's name, as it is for requests (invariant 11). Not here: what engines hold in
device memory, which goes with its requests, and responses, which are kept nowhere.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from roundhouse.block_keys import tenant_salt
from roundhouse.errors import InvalidInput, RoundhouseError
from roundhouse.vocabulary import KeyId
from services.gateway.operations.admin_ports import AuditTrail, NodeStates

TIMEOUT_MS = 60_000  # overwriting 60 GB at 1 GB/s; a second call goes on where the first stopped


@dataclass(frozen=True, slots=True)
class NodeErasure:
    """What one node's kvstore dropped, over its tiers, and what it counted of the tenant afterwards."""

    blocks: int
    blocks_left: int


class NodeCaches(Protocol):
    """The kvstores, for what an operator asks of them."""

    async def erase(self, address: str, salt: bytes, *, timeout_ms: int) -> NodeErasure:
        """Drop every block of a salt, then count. Idempotent. Raises DeadlinePassed, Unavailable."""
        ...


class ErasureOrders(Protocol):
    """Orders for nodes that are away."""

    async def order(self, tenant: str, salt_hash: bytes) -> None:
        """Keep one for good. Raises Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class ErasedOnNode:
    """One node's outcome; `error` is empty if it answered."""

    node_id: str
    blocks: int = 0
    blocks_left: int = 0
    error: str = ""


class CacheErasure:
    """One cluster's caches. `cluster` is what the gateway makes salts with."""

    def __init__(
        self, cluster: str, nodes: NodeStates, caches: NodeCaches, orders: ErasureOrders, audit: AuditTrail
    ) -> None:
        self._cluster = cluster
        self._orders = orders
        self._nodes = nodes
        self._caches = caches
        self._audit = audit

    async def erase(self, tenant: str, *, actor: KeyId) -> Sequence[ErasedOnNode]:
        """Ask every node that is alive, at once. Idempotent, also for a tenant that is no more. Raises InvalidInput,
        Unavailable (nobody knows the nodes, or the order cannot be kept: nothing was asked then). A node that is away
        is not in the answer: it finds the order when it is back, and tells the audit stream.
        """
        if not tenant:
            raise InvalidInput("names a tenant", param="tenant")
        salt = tenant_salt(self._cluster, tenant)
        await self._orders.order(tenant, sha256(salt).digest())
        states = [state for state in await self._nodes.all() if state.kvstore_address]
        places = dict.fromkeys((state.kvstore_address, state.node_id) for state in states)
        outcomes = await asyncio.gather(*(self._erase_on(node_id, address, salt) for address, node_id in places))
        details = {outcome.node_id: outcome.error or f"{outcome.blocks} blocks" for outcome in outcomes}
        await self._audit.record("cache_erased", actor=actor, subject=tenant, details=details)
        return outcomes

    async def _erase_on(self, node_id: str, address: str, salt: bytes) -> ErasedOnNode:
        try:
            erasure = await self._caches.erase(address, salt, timeout_ms=TIMEOUT_MS)
        except RoundhouseError as error:
            return ErasedOnNode(node_id, error=error.message)
        return ErasedOnNode(node_id, erasure.blocks, erasure.blocks_left)
