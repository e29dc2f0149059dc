"""Which nodes a model belongs to: the same few for every replica of the scheduler, whatever else changes.

Rendezvous hashing (Thaler and Ravishankar, 1998): every node gets a weight from its own and the model's name, the
largest win. A node that comes or goes moves only the models that it wins or had; what a model's nodes hold of it on
disk, in host memory and as prefix blocks so stays of use.
"""

from functools import lru_cache
from hashlib import blake2b

from roundhouse.vocabulary import NodeId
from services.scheduler.domain.records import VersionKey, model_of


def weight(version: VersionKey, node_id: NodeId) -> int:
    """The node's claim on a model; versions and owners of one model share their nodes. About 1 us."""
    model = model_of(version)
    return int.from_bytes(blake2b(f"{len(model)}:{model}{node_id}".encode(), digest_size=8).digest(), "big")


@lru_cache(maxsize=4_096)  # models that are placed again and again while the nodes stay; a miss costs 1 us a node
def order(version: VersionKey, node_ids: tuple[NodeId, ...]) -> tuple[NodeId, ...]:
    """The nodes by their claim on a model, highest first. O(nodes log nodes), O(nodes) when asked again."""
    return tuple(sorted(node_ids, key=lambda node_id: (-weight(version, node_id), node_id)))


def subset_size(replicas: int, replicas_wanted: int) -> int:
    """By demand: the replicas there are or must be, and one to move or grow to."""
    return max(1, replicas, replicas_wanted) + 1
