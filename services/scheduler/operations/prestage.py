"""Bring weights into host memory ahead of requests: where a device load would not pay, a load from RAM soon might.

Only into host memory that is free, only while no request waits for a load, one at a time a node. Nothing is claimed: a
loader joins a second order for the same version to the first, and what it says of its tiers ends the next one.
"""

from functools import partial

import structlog

from roundhouse.clock import Clock
from roundhouse.errors import RoundhouseError
from roundhouse.vocabulary import NodeId, PoolName
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from services.scheduler.domain.affinity import order
from services.scheduler.domain.nodes import NodeView, Residence, Role, Tier, VersionSpec
from services.scheduler.domain.placement import PoolView
from services.scheduler.domain.records import VersionKey, model_of, owner_of
from services.scheduler.operations.foresight import Foresight
from services.scheduler.operations.keyed_tasks import KeyedTasks
from services.scheduler.operations.orders import wire_version
from services.scheduler.operations.pools import Pools
from services.scheduler.ports import LoaderFleet

log = structlog.get_logger(__name__)

STAGE_LEAST_PER_MINUTE = 0.02  # arrivals in a minute of the place below which nothing is staged: a guess, a fifth of
# what a device load must promise, since host memory is plentier
DEADLINE_MS = 120_000


class Prestaging:
    """The stagings of one process, for all pools."""

    def __init__(self, pools: Pools, loaders: LoaderFleet, foresight: Foresight, clock: Clock) -> None:
        self._pools = pools
        self._loaders = loaders
        self._foresight = foresight
        self._clock = clock
        self._running: KeyedTasks[NodeId] = KeyedTasks("prestage")

    async def turn(self) -> None:
        """Begin what pays, in every pool. To be called every few seconds; what was begun ends by itself."""
        for pool in sorted(self._pools.names()):
            self._consider(pool)

    def _consider(self, pool: PoolName) -> None:
        view = self._pools.view(pool)
        if view.state.depths:
            return
        for worth, version in self._foresight.expected(pool):
            if worth < STAGE_LEAST_PER_MINUTE:
                return
            spec = view.specs.get(version)
            if spec is not None and not owner_of(version) and not _is_near(view, version):
                self._stage_somewhere(view, spec)

    async def stop(self) -> None:
        """Follow no more; the loaders go on."""
        await self._running.stop()

    def _stage_somewhere(self, view: PoolView, spec: VersionSpec) -> None:
        nodes = {node.node_id: node for node in view.nodes if node.healthy and node.role is not Role.PREFILL}
        for node_id in order(spec.version, tuple(sorted(nodes))):
            if self._fits(nodes[node_id], spec):
                self._running.begin(node_id, partial(self._stage, node_id, spec.version))
                return

    def _fits(self, node: NodeView, spec: VersionSpec) -> bool:
        state = self._pools.nodes.state(node.node_id)
        if state is None or node.node_id in self._running:
            return False
        host = next((tier for tier in state.tiers if tier.tier == vocabulary_pb2.TIER_HOST), None)
        return host is not None and host.capacity - host.resident - host.reserved >= spec.device_bytes

    async def _stage(self, node_id: NodeId, version: VersionKey) -> None:
        state = self._pools.nodes.state(node_id)
        if state is None:
            return
        request = loading_pb2.EnsureLoadedRequest(
            version=wire_version(version),
            generation=self._clock.now_ms(),
            deadline_ms=DEADLINE_MS,
            reason="prewarm",
            target=vocabulary_pb2.TIER_HOST,
        )
        log.info("staging_begun", model=model_of(version), node=node_id)
        try:
            async for _ in self._loaders.ensure_loaded(state.loader_address, request):
                pass
        except RoundhouseError as error:
            log.info("staging_failed", model=model_of(version), node=node_id, error=error.message)


def _is_near(view: PoolView, version: VersionKey) -> bool:
    """Whether some node has it on a device, in host memory, or on the way."""
    found = (node.find_any(version) for node in view.nodes if node.healthy)
    return any(
        each is not None and (each.tier is Tier.HOST or each.residence not in (Residence.STAGED, Residence.FAILED))
        for each in found
    )
