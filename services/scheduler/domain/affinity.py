"""Which nodes a model belongs to: the same few for every replica of the scheduler, whatever else changes.

Rendezvous hashing (Thaler and Ravishankar, 1998): every node gets a weight from its own and the model's name, the
largest win. A node that comes or goes moves only the models that it wins or had; what a model's nodes hold of it on
disk, in host memory and as prefix blocks so stays of use.
"""

from collections.abc import Iterable
from hashlib import blake2b

from roundhouse.vocabulary import NodeId
from services.scheduler.domain.records import VersionKey, model_of


def weight(version: VersionKey, node_id: NodeId) -> int:
    """The node's claim on a model; versions and owners of one model share their nodes. About 1 us."""
    model = model_of(version)
    return int.from_bytes(blake2b(f"{len(model)}:{model}{node_id}".encode(), digest_size=8).digest(), "big")


def subset(version: VersionKey, node_ids: Iterable[NodeId], size: int) -> frozenset[NodeId]:
    """The nodes that a model belongs to when it is given `size` of them. O(nodes log nodes)."""
    return frozenset(sorted(node_ids, key=lambda node_id: (-weight(version, node_id), node_id))[:size])


def subset_size(replicas: int, replicas_wanted: int) -> int:
    """By demand: the replicas there are or must be, and one to move or grow to."""
    return max(1, replicas, replicas_wanted) + 1
