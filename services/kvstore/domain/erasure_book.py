"""Which erasures a node has carried out, so that it takes no block of an erased tenant from a node that has not.

Orders are numbered. A node that was away has old blocks until it has read them; it says with every block how far it
has read, and who has read an order for the block's salt beyond that leaves the block. Salts are known by their hash.
Pure; bounded. Decision: docs/decisions/0171-blocks-of-the-erased-stay-away.md.
"""

from collections.abc import Mapping
from hashlib import sha256

ORDERS_MAX = 1_000  # remembered; as many are read again by a new process. A guess: more than an outage sees


class ErasureBook:
    """Of one node."""

    def __init__(self, read_to: int = 0) -> None:
        """`read_to`: the last order that earlier processes carried out."""
        self.read_to = read_to
        self._orders: dict[bytes, int] = {}  # by hash of a salt, the newest last

    def enter(self, orders: Mapping[bytes, int]) -> None:
        """Orders by the hash of their salt; they may be in here already."""
        for salt_hash, number in sorted(orders.items(), key=lambda order: order[1]):
            self._orders.pop(salt_hash, None)
            self._orders[salt_hash] = number
        for salt_hash in list(self._orders)[: max(0, len(self._orders) - ORDERS_MAX)]:
            del self._orders[salt_hash]

    def forget(self) -> None:
        """It is another stream than the one that was read."""
        self.read_to = 0
        self._orders.clear()

    def may_come(self, salt: bytes, read_to: int) -> bool:
        """Whether a block of a salt is welcome from a node that has carried out the orders up to `read_to`."""
        return not self._orders or self._orders.get(sha256(salt).digest(), 0) <= read_to
