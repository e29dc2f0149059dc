"""An instance whose process died: no new request on it at once, then off its node, until the node says it is gone.

Triton goes on calling such a model READY, and may never confirm its unload. So the mark that closes the instance is
kept alive until the unload is confirmed, and its memory counts as taken; demand loads the model on another node, or on
this one afterwards. The mark is in the store, so every replica knows. If this process dies, another one goes on as soon
as the mark is older than a living follower would let it become.
"""

from contextlib import suppress
from functools import partial

import structlog

from roundhouse.clock import Clock
from roundhouse.errors import RoundhouseError, Unavailable
from roundhouse.vocabulary import NodeId, PoolName
from services.scheduler.domain.nodes import Residence
from services.scheduler.domain.records import BROKEN, InstanceKey, VersionKey, instance_key, model_of
from services.scheduler.domain.residency import DrainOrder
from services.scheduler.operations.dispatch import Dispatcher
from services.scheduler.operations.keyed_tasks import KeyedTasks
from services.scheduler.operations.orders import unload_order
from services.scheduler.operations.pools import Pools
from services.scheduler.ports import LoaderFleet, SchedulingStore

log = structlog.get_logger(__name__)

HOLD_MS = 15_000  # as the marks of loads: what a crashed replica leaves ends after this
ORPHAN_MS = 8_000  # a follower renews its mark each `UNLOAD_MS` + `PAUSE_MS`, so none is ever this near its end
UNLOAD_MS = 4_000  # of one order; renewed well within `HOLD_MS`
PAUSE_MS = 1_000  # between orders, and for the node's next state
REASON = "broken"


class BrokenInstances:
    """Follows the instances that this process was told about. One task an instance."""

    def __init__(
        self, store: SchedulingStore, pools: Pools, loaders: LoaderFleet, dispatcher: Dispatcher, clock: Clock
    ) -> None:
        self._store = store
        self._pools = pools
        self._loaders = loaders
        self._dispatcher = dispatcher
        self._clock = clock
        self._following: KeyedTasks[InstanceKey] = KeyedTasks("broken-instance")

    async def report(self, pool: PoolName, node_id: NodeId, version: VersionKey, run_ms: int) -> None:
        """A request that ran `run_ms` found the instance dead. Idempotent; raises Unavailable.

        Ignored if the instance became ready only after that request began: it is a new one, and may be well."""
        key = instance_key(node_id, version)
        now_ms = self._clock.now_ms()
        if key in self._following or not self._pools.is_ready(node_id, version, since_ms=now_ms - run_ms):
            return
        await self._close(pool, key, version)
        if self._follow(pool, node_id, version):
            log.warning("instance_broken", node=node_id, model=model_of(version))

    async def adopt(self, pool: PoolName) -> None:
        """Go on with what another replica was told and has left. Raises Unavailable."""
        view, now_ms = self._pools.view(pool), self._clock.now_ms()
        for node in view.nodes:
            for each in node.instances:
                key = instance_key(node.node_id, each.version)
                mark = view.state.drains.get(key)
                if mark is None or mark.purpose != BROKEN or not now_ms < mark.until_ms < now_ms + ORPHAN_MS:
                    continue
                if key not in self._following and each.residence is Residence.READY:
                    await self._close(pool, key, each.version)
                    if self._follow(pool, node.node_id, each.version):
                        log.warning("broken_instance_adopted", node=node.node_id, model=model_of(each.version))

    def _follow(self, pool: PoolName, node_id: NodeId, version: VersionKey) -> bool:
        """Whether it was not followed yet: two requests may have told of it at once."""
        return self._following.begin(instance_key(node_id, version), partial(self._remove, pool, node_id, version))

    async def stop(self) -> None:
        """Follow no longer; the unloads go on at their loaders."""
        await self._following.stop()

    async def _close(self, pool: PoolName, key: InstanceKey, version: VersionKey) -> None:
        now_ms = self._clock.now_ms()
        order = DrainOrder(key, version, BROKEN, now_ms + HOLD_MS, rotate=True)
        await self._store.begin_drain(pool, order, now_ms)  # denied = closed already, for another purpose

    async def _remove(self, pool: PoolName, node_id: NodeId, version: VersionKey) -> None:
        key, found = instance_key(node_id, version), self._pools.nodes.instance(node_id, version)
        ready_ms = found.since_ms if found is not None else 0  # one that became ready later is another one
        self._dispatcher.wake(pool)  # its demand is cold now: a plan may load it elsewhere at once
        while (state := self._pools.nodes.state(node_id)) is not None and self._stands(node_id, version, ready_ms):
            if await self._unloaded(state.loader_address, version):
                break
            await self._clock.sleep_ms(PAUSE_MS)
            with suppress(Unavailable):
                await self._close(pool, key, version)
        while self._pools.is_ready(node_id, version, since_ms=ready_ms):  # until the node itself says that it has gone
            await self._clock.sleep_ms(50)
        with suppress(Unavailable):  # then the mark ends by itself
            await self._store.clear_drain(pool, key, self._clock.now_ms())
        self._dispatcher.wake(pool)

    def _stands(self, node_id: NodeId, version: VersionKey, ready_ms: int) -> bool:
        """Whether the node still has it, or unloads it. An unload order would end one that came after it as well."""
        found = self._pools.nodes.instance(node_id, version)
        leaves = found is not None and found.residence in (Residence.DRAINING, Residence.UNLOADING)
        return leaves or self._pools.is_ready(node_id, version, since_ms=ready_ms)

    async def _unloaded(self, address: str, version: VersionKey) -> bool:
        request = unload_order(version, self._clock.now_ms(), deadline_ms=UNLOAD_MS, reason=REASON)
        try:
            await self._loaders.ensure_unloaded(address, request)
        except RoundhouseError as error:
            log.info("broken_instance_stays", model=model_of(version), reason=error.message)
            return False
        return True
