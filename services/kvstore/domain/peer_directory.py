"""Who else has which blocks, from what the other nodes announce. A hint: who is asked may have lost a block meanwhile.

Of each key only its first bytes are kept; two keys that begin alike cost a question in vain. A node whose announcements
have a gap is `lost` until a snapshot mends it; what is known of it stays in use meanwhile. Pure: no bus, no clock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

PREFIX_BYTES = 8  # of a SHA-256 key: among 10^7 blocks two begin alike with a chance of 3 in a million
KEYS_A_NODE_MAX = 1_000_000  # a guess: 80 MB here; beyond it later blocks of that node are not known


@dataclass(slots=True)
class _Node:
    address: str = ""
    seen_ms: int = 0
    incarnation: str = ""
    sequence: int = -1
    lost: bool = True  # of a node that is new, what it stored before is not known
    keys: set[bytes] = field(default_factory=set)


class PeerDirectory:
    """The other nodes of the cluster; `own_node_id` is never among them."""

    def __init__(self, own_node_id: str) -> None:
        """Nobody is known."""
        self._own = own_node_id
        self._nodes: dict[str, _Node] = {}

    def node_seen(self, node_id: str, address: str, now_ms: int) -> None:
        """A node lives, and its kvstore listens at `address`; empty = it has none."""
        if node_id == self._own:
            return
        if not address:
            self._nodes.pop(node_id, None)
            return
        node = self._nodes.setdefault(node_id, _Node())
        node.address, node.seen_ms = address, now_ms

    def forget_silent(self, before_ms: int) -> None:
        """Forget nodes not seen since."""
        for node_id in [node_id for node_id, node in self._nodes.items() if node.seen_ms < before_ms]:
            del self._nodes[node_id]

    def heard(
        self, node_id: str, incarnation: str, sequence: int, stored: Iterable[bytes], dropped: Iterable[bytes]
    ) -> None:
        """A message of block events. Messages of nodes that were not seen are ignored: nobody could ask them."""
        node = self._nodes.get(node_id)
        if node is None:
            return
        stored, dropped = list(stored), list(dropped)
        if node.incarnation != incarnation:
            node.incarnation, node.lost, node.sequence, node.keys = incarnation, True, sequence, set()
        expected = node.sequence + 1 if stored or dropped else node.sequence
        if sequence < expected:
            return  # older than a snapshot, and in it
        if sequence > expected:
            node.lost = True
        node.sequence = sequence
        node.keys.difference_update(key[:PREFIX_BYTES] for key in dropped)
        if len(node.keys) < KEYS_A_NODE_MAX:
            node.keys.update(key[:PREFIX_BYTES] for key in stored)

    def snapshot(self, node_id: str, incarnation: str, sequence: int, keys: Iterable[bytes]) -> None:
        """Everything a node had at `sequence`. Ignored if newer events have been heard: another one is needed."""
        node = self._nodes.get(node_id)
        if node is None or (node.incarnation == incarnation and node.sequence > sequence):
            return
        node.incarnation, node.sequence, node.lost = incarnation, sequence, False
        node.keys = {key[:PREFIX_BYTES] for key in islice(keys, KEYS_A_NODE_MAX)}

    def lost(self) -> list[tuple[str, str]]:
        """Ids and addresses of nodes of which a snapshot is needed."""
        return [(node_id, node.address) for node_id, node in self._nodes.items() if node.lost]

    def holders(self, keys: Sequence[bytes]) -> list[str]:
        """Addresses of nodes that have `keys[0]`, the longest run first. O(nodes x run)."""
        runs = [(-_run(node.keys, keys), node_id, node.address) for node_id, node in self._nodes.items()]
        return [address for run, _, address in sorted(runs) if run]

    def run_length(self, keys: Sequence[bytes]) -> int:
        """The longest leading run of `keys` at one node."""
        return max((_run(node.keys, keys) for node in self._nodes.values()), default=0)

    def keys_known(self) -> int:
        """Keys of all nodes together."""
        return sum(len(node.keys) for node in self._nodes.values())


def _run(known: set[bytes], keys: Sequence[bytes]) -> int:
    for number, key in enumerate(keys):
        if key[:PREFIX_BYTES] not in known:
            return number
    return len(keys)
