"""The view of one pool that decisions are made from: nodes as heard, the catalogue as read, queues as last seen.

Here instances get their owners: what stands on a prefill node is for prompts, what was loaded for a tenant with
replicas of its own is for that tenant, everything else is for all. Without `disaggregated` every node does everything.
"""

from dataclasses import dataclass, replace

from roundhouse.catalogue.records import DEDICATED_MIG, Catalogue
from roundhouse.clock import Clock
from roundhouse.vocabulary import ModelName, NodeId, PoolName, TenantId
from roundhouse.wire.v1 import loading_pb2, scheduling_pb2
from services.scheduler.domain.nodes import InstanceView, NodeView, Residence, Role, VersionSpec
from services.scheduler.domain.plans import PoolView
from services.scheduler.domain.records import (
    PREFILL_STAGE,
    Offer,
    Part,
    PoolState,
    VersionKey,
    base_of,
    digest_of,
    instance_key,
    model_of,
    owner_of,
    version_key,
)
from services.scheduler.domain.speeds import Speeds
from services.scheduler.operations import places
from services.scheduler.operations.nodes import NodeRegistry
from services.scheduler.ports import CatalogueSource, SchedulingStore

DEFAULT_POOL = PoolName("shared")
EMPTY_STATE = PoolState(0, (), {}, {}, {}, {}, {})
FRESH_MS = 100  # a view is made again after this, so that a node that went silent is out within 2 s


@dataclass(frozen=True, slots=True)
class _Made:
    """A view, and what it was made from."""

    view: PoolView
    at_ms: int
    revision: int
    state: PoolState
    catalogue: Catalogue


class Pools:
    """Looks pools up; `refresh` reads the store, everything else is memory."""

    def __init__(
        self,
        store: SchedulingStore,
        nodes: NodeRegistry,
        catalogue: CatalogueSource,
        clock: Clock,
        *,
        disaggregated: bool = False,
    ) -> None:
        self._store = store
        self.nodes = nodes
        self.catalogue = catalogue
        self.speeds = Speeds()
        self._clock = clock
        self._disaggregated = disaggregated
        self._states: dict[PoolName, PoolState] = {}
        self._made: dict[PoolName, _Made] = {}
        self._named: frozenset[PoolName] = frozenset()
        self._named_by: Catalogue | None = None

    def names(self) -> set[PoolName]:
        """Pools that exist: with nodes, named by the catalogue, or with something left of before in the queues."""
        left = {pool for pool, state in self._states.items() if state.depths or state.in_use}
        return self.nodes.pools() | self._declared() | left

    def _declared(self) -> frozenset[PoolName]:
        catalogue = self.catalogue.current
        if self._named_by is not catalogue:
            own = (tenant.isolation for tenant in catalogue.tenants.values() if not tenant.has_own_instances)
            of_models = {model.pool for model in catalogue.models.values()}
            self._named = frozenset(of_models | {PoolName(each) for each in own if each != "shared"})
            self._named_by = catalogue
        return self._named

    async def refresh(self, pool: PoolName) -> PoolView:
        """The view with queues as they are now. Raises Unavailable."""
        self._states[pool] = await self._store.snapshot(pool, self._clock.now_ms())
        return self.view(pool)

    def view(self, pool: PoolName) -> PoolView:
        """The view with queues as last read: at most one tick old while the store answers."""
        state, catalogue = self._states.get(pool, EMPTY_STATE), self.catalogue.current
        now_ms, made = self._clock.now_ms(), self._made.get(pool)
        if (
            made is None
            or made.revision != self.nodes.revision
            or made.state is not state
            or made.catalogue is not catalogue
            or now_ms - made.at_ms >= FRESH_MS
        ):
            made = _Made(self._view(pool, state), now_ms, self.nodes.revision, state, catalogue)
            self._made[pool] = made
        return made.view

    def _view(self, pool: PoolName, state: PoolState) -> PoolView:
        nodes = tuple(self._owned(node, state) for node in self.nodes.nodes(pool))
        specs = self.specs(pool)
        named = {depth.version for depth in state.depths}
        named.update(each.version for node in nodes for each in node.instances)
        specs.update((version, spec) for version in named - specs.keys() if (spec := self.spec(version)) is not None)
        return PoolView(nodes, state, specs, start_ms=self.nodes.starts_ms)

    def _owned(self, node: NodeView, state: PoolState) -> NodeView:
        """The node with the owners of its instances in their version keys."""
        if not self._disaggregated and node.role is not Role.MIXED:
            node = replace(node, role=Role.MIXED)
        if node.role is not Role.PREFILL and not state.owners:
            return node
        instances = tuple(self._with_owner(node, each, state) for each in node.instances)
        return node if instances == node.instances else replace(node, instances=instances)

    def _with_owner(self, node: NodeView, instance: InstanceView, state: PoolState) -> InstanceView:
        owner: str = PREFILL_STAGE
        if node.role is not Role.PREFILL:
            owner = state.owners.get(instance_key(node.node_id, instance.version), TenantId(""))
            tenant = self.catalogue.current.tenants.get(TenantId(owner))
            if tenant is None or not tenant.has_own_instances:
                return instance  # it is not that tenant's any more
        return replace(instance, version=version_key(model_of(instance.version), digest_of(instance.version), owner))

    def specs(self, pool: PoolName) -> dict[VersionKey, VersionSpec]:
        """The catalogue's current versions that live in a pool."""
        catalogue = self.catalogue.current
        models = (model for model in catalogue.models.values() if model.pool == pool)
        return {
            (key := version_key(model.name, model.digest)): VersionSpec(
                key,
                model.device_bytes,
                catalogue.is_pinned(model),
                catalogue.least_replicas(model),
                model.tensor_parallel,
                start_slo_ms=model.ttft_slo_ms,
            )
            for model in models
        }

    def spec(self, version: VersionKey) -> VersionSpec | None:
        """A version that is wanted in a pool without living there: a tenant's own pool or replicas, or for prompts."""
        model = self.catalogue.current.models.get(ModelName(model_of(version)))
        if model is None or model.digest != digest_of(version):
            return None
        owner = owner_of(version)
        tenant = self.catalogue.current.tenants.get(TenantId(owner))
        if owner and owner != PREFILL_STAGE and (tenant is None or not tenant.has_own_instances):
            return None
        alone = tenant is not None and tenant.isolation == DEDICATED_MIG
        return VersionSpec(version, model.device_bytes, devices=model.tensor_parallel, alone=alone)

    def queued_as(self, tenant_id: TenantId, model: str, digest: str) -> VersionKey:
        """What a tenant's requests for a version queue for: the shared instances or those of its own."""
        tenant = self.catalogue.current.tenants.get(tenant_id)
        return version_key(model, digest, tenant_id if tenant is not None and tenant.has_own_instances else "")

    def is_ready(self, node_id: NodeId, version: VersionKey, *, since_ms: int | None = None) -> bool:
        """Whether the node says that it serves a version, whoever it is for, and did so already at `since_ms`."""
        found = self.nodes.instance(node_id, version)
        if found is None or found.residence is not Residence.READY:
            return False
        return since_ms is None or found.since_ms <= since_ms

    def offers(self, pool: PoolName, versions: set[VersionKey] | None) -> list[Offer]:
        """Ready instances on healthy nodes, of the given versions or (None) of all."""
        view, now_ms = self.view(pool), self._clock.now_ms()
        return [
            self._offer(node, each, view.state, now_ms)
            for node in view.nodes
            if node.healthy
            for each in node.instances
            if each.residence is Residence.READY
            and each.slots
            and (versions is None or _served(each.version) in versions)
        ]

    def _offer(self, node: NodeView, instance: InstanceView, state: PoolState, now_ms: int) -> Offer:
        key = instance_key(node.node_id, instance.version)
        speed = self.speeds.of(key, instance.version, now_ms)
        part = {Role.MIXED: Part.WHOLE, Role.DECODE: Part.DECODE, Role.PREFILL: Part.PREFILL}[node.role]
        return Offer(
            instance=key,
            version=_served(instance.version),
            slots=instance.slots,
            place=places.encode(self._placement(node.node_id, instance), instance),
            part=part,
            token_us=round(speed.token_us),
            load_us=round(speed.first_us),
            handoff_us=round(self.speeds.handoff_us(instance.version, now_ms)) if part is Part.PREFILL else 0,
            owner=state.owners.get(key, ""),
        )

    def _placement(self, node_id: NodeId, instance: InstanceView) -> scheduling_pb2.Placement:
        state = self.nodes.state(node_id)
        assert state is not None, "a view is made from a state"
        names = (each.triton_model_name for each in state.instances if _version(each) == base_of(instance.version))
        return scheduling_pb2.Placement(
            node_id=node_id,
            role=state.role,
            triton_grpc_address=state.triton_grpc_address,
            triton_model_name=next(names, ""),
            kvstore_address=state.kvstore_address,
            loader_address=state.loader_address,
        )


def _served(version: VersionKey) -> VersionKey:
    """What requests queue for that an instance serves."""
    return base_of(version) if owner_of(version) == PREFILL_STAGE else version


def _version(message: loading_pb2.Instance) -> VersionKey:
    return version_key(message.version.model, message.version.digest)
