"""Carries out the erasures of tenants that were ordered while this node was away, once it hears of them.

Every erasure is also an order in a stream that outlives processes. A node remembers on its disk how far it has read;
what was ordered after that, of salts that it still holds, it erases before it remembers more. So a node that was down,
cut off, or restored from an old disk forgets the tenant within seconds of its return. Orders name salts by their hash:
a salt opens blocks, and stays with those who have it. What was read is in the node's book; a new process reads the last
orders of earlier ones again. Idempotent; a fault leaves the order for the next turn.
"""

from collections.abc import Awaitable, Callable
from hashlib import sha256

import structlog

from roundhouse.errors import Unavailable
from services.kvstore.domain.erasure_book import ORDERS_MAX, ErasureBook
from services.kvstore.operations.serve_blocks import BlockService
from services.kvstore.ports import ErasureMark, ErasureOrders

log = structlog.get_logger(__name__)

Told = Callable[[str, int], Awaitable[None]]  # a tenant, and how many blocks of it were dropped


class LateErasures:
    """Of one node. `told` hears of each tenant that was erased late."""

    def __init__(
        self, service: BlockService, orders: ErasureOrders, mark: ErasureMark, told: Told, book: ErasureBook
    ) -> None:
        """`mark` survives the process if blocks do; `book` begins with it."""
        self._service, self._orders, self._mark, self._told, self._book = service, orders, mark, told, book
        self._ask_after = max(0, book.read_to - ORDERS_MAX)

    async def catch_up(self) -> None:
        """Do what was ordered since. Never raises for a bus or a disk that is away: the next turn asks again."""
        marked = self._book.read_to
        try:
            newest, ordered = await self._orders.after(self._ask_after)
            if newest < marked:  # another stream than the one that was read: all of it is news
                self._book.forget()
                self._ask_after = 0
                newest, ordered = await self._orders.after(0)
            self._book.enter({salt_hash: order.number for salt_hash, order in ordered.items()})
            for salt in self._service.salts() if newest > self._book.read_to else ():
                order = ordered.get(sha256(salt).digest())
                if order is not None and order.number > self._book.read_to:
                    await self._erase(order.tenant, salt)
        except Unavailable as error:
            log.info("erasures_not_read", text=error.message)
            return
        if newest != marked:
            self._mark.save(newest)
        self._book.read_to = self._ask_after = newest

    async def _erase(self, tenant: str, salt: bytes) -> None:
        erased = await self._service.erase_salt(salt)
        if erased.blocks_left:
            raise Unavailable("blocks of an erased tenant are left")
        log.info("erased_late", tenant_id=tenant, blocks=erased.blocks)
        await self._told(tenant, erased.blocks)
