"""The view of one pool that decisions are made from: nodes as heard, the catalogue as read, queues as last seen."""

from roundhouse.clock import Clock
from roundhouse.vocabulary import NodeId, PoolName
from roundhouse.wire.v1 import loading_pb2, scheduling_pb2, vocabulary_pb2
from services.scheduler.domain.nodes import InstanceView, NodeView, Residence, VersionSpec
from services.scheduler.domain.placement import PoolView
from services.scheduler.domain.records import Offer, PoolState, VersionKey, instance_key, version_key
from services.scheduler.operations import places
from services.scheduler.operations.nodes import NodeRegistry
from services.scheduler.ports import CatalogueSource, SchedulingStore

DEFAULT_POOL = PoolName("shared")
EMPTY_STATE = PoolState(0, (), {}, {}, {}, {}, {})


class Pools:
    """Looks pools up; `refresh` reads the store, everything else is memory."""

    def __init__(self, store: SchedulingStore, nodes: NodeRegistry, catalogue: CatalogueSource, clock: Clock) -> None:
        self._store = store
        self.nodes = nodes
        self.catalogue = catalogue
        self._clock = clock
        self._states: dict[PoolName, PoolState] = {}

    def names(self) -> set[PoolName]:
        """Pools that exist: with nodes, or named by a model."""
        return self.nodes.pools() | {model.pool for model in self.catalogue.current.models.values()}

    async def refresh(self, pool: PoolName) -> PoolView:
        """The view with queues as they are now. Raises Unavailable."""
        self._states[pool] = await self._store.snapshot(pool, self._clock.now_ms())
        return self.view(pool)

    def view(self, pool: PoolName) -> PoolView:
        """The view with queues as last read: at most one tick old while the store answers."""
        return PoolView(self.nodes.nodes(pool), self._states.get(pool, EMPTY_STATE), self.specs(pool))

    def specs(self, pool: PoolName) -> dict[VersionKey, VersionSpec]:
        """The catalogue's current versions that live in a pool."""
        models = (model for model in self.catalogue.current.models.values() if model.pool == pool)
        return {
            (key := version_key(model.name, model.digest)): VersionSpec(
                key, model.device_bytes, model.pinned, model.min_replicas
            )
            for model in models
        }

    def is_ready(self, node_id: NodeId, version: VersionKey) -> bool:
        """Whether the node says that it serves a version."""
        state = self.nodes.state(node_id)
        return state is not None and any(
            _version(each) == version and each.state == vocabulary_pb2.INSTANCE_STATE_READY for each in state.instances
        )

    def offers(self, pool: PoolName, versions: set[VersionKey] | None) -> list[Offer]:
        """Ready instances on healthy nodes, of the given versions or (None) of all."""
        return [
            self._offer(node, each)
            for node in self.nodes.nodes(pool)
            if node.healthy
            for each in node.instances
            if each.residence is Residence.READY and each.slots and (versions is None or each.version in versions)
        ]

    def _offer(self, node: NodeView, instance: InstanceView) -> Offer:
        place = places.encode(self._placement(node.node_id, instance), instance)
        return Offer(instance_key(node.node_id, instance.version), instance.version, instance.slots, place)

    def _placement(self, node_id: NodeId, instance: InstanceView) -> scheduling_pb2.Placement:
        state = self.nodes.state(node_id)
        assert state is not None, "a view is made from a state"
        names = (each.triton_model_name for each in state.instances if _version(each) == instance.version)
        return scheduling_pb2.Placement(
            node_id=node_id,
            role=state.role,
            triton_grpc_address=state.triton_grpc_address,
            triton_model_name=next(names),
            kvstore_address=state.kvstore_address,
        )


def _version(message: loading_pb2.Instance) -> VersionKey:
    return version_key(message.version.model, message.version.digest)
