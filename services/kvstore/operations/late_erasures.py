"""Carries out the erasures of tenants that were ordered while this node was away, once it hears of them.

Every erasure is also an order in a stream that outlives processes. A node remembers on its disk how far it has read;
what was ordered after that, of salts that it still holds, it erases before it remembers more. So a node that was down,
cut off, or restored from an old disk forgets the tenant within seconds of its return. Orders name salts by their hash:
a salt opens blocks, and stays with those who have it. Idempotent; a fault leaves the order for the next turn.
"""

from collections.abc import Awaitable, Callable
from hashlib import sha256

import structlog

from roundhouse.errors import Unavailable
from services.kvstore.operations.serve_blocks import BlockService
from services.kvstore.ports import ErasureMark, ErasureOrders

log = structlog.get_logger(__name__)

Told = Callable[[str, int], Awaitable[None]]  # a tenant, and how many blocks of it were dropped


class LateErasures:
    """Of one node. `told` hears of each tenant that was erased late."""

    def __init__(self, service: BlockService, orders: ErasureOrders, mark: ErasureMark, told: Told) -> None:
        """`mark` survives the process if blocks do."""
        self._service, self._orders, self._mark, self._told = service, orders, mark, told
        self._read_to = mark.load()

    async def catch_up(self) -> None:
        """Do what was ordered since. Never raises for a bus or a disk that is away: the next turn asks again."""
        try:
            newest, ordered = await self._orders.after(self._read_to)
            if newest < self._read_to:  # another stream than the one that was read: all of it is news
                newest, ordered = await self._orders.after(0)
            for salt in self._service.salts() if ordered else ():
                tenant = ordered.get(sha256(salt).digest())
                if tenant is not None:
                    await self._erase(tenant, salt)
        except Unavailable as error:
            log.info("erasures_not_read", text=error.message)
            return
        if newest != self._read_to:
            self._mark.save(newest)
            self._read_to = newest

    async def _erase(self, tenant: str, salt: bytes) -> None:
        erased = await self._service.erase_salt(salt)
        if erased.blocks_left:
            raise Unavailable("blocks of an erased tenant are left")
        log.info("erased_late", tenant_id=tenant, blocks=erased.blocks)
        await self._told(tenant, erased.blocks)
