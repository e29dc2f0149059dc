"""Carry out placement: close instances, claim loads, ask loaders, and say what became of it.

`consider` takes a snapshot, plans and acts; it never waits for a load. Each load runs in a task of its own and keeps
its claim and drain marks alive until the node has said what is loaded now: only then may another plan count on that
memory.
While nothing waits for a load it begins those that the forecast says would pay. What leaves and what is loaded goes
into the audit stream with its reason.
A load that fails is tried again after a pause; after `LOAD_TRIES` everything that waits for it is refused with the
cause, and what could not live to see the next try is refused at once (case B18).
"""

import asyncio
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass, replace

import structlog

from roundhouse.clock import Clock
from roundhouse.errors import CapacityExhausted, RoundhouseError, Unavailable
from roundhouse.vocabulary import PoolName
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from services.scheduler.domain.placement import Load, PoolView, ResidencyPolicy, Rotate, plan
from services.scheduler.domain.records import (
    Draining,
    InstanceKey,
    LoadClaim,
    PoolState,
    RefusalReason,
    VersionKey,
    base_of,
    model_of,
    version_key,
)
from services.scheduler.domain.residency import Claimed, ClaimOrder, DrainOrder
from services.scheduler.domain.sites import sited
from services.scheduler.domain.viability import BackingOff, is_served, viability
from services.scheduler.operations.dispatch import Dispatcher
from services.scheduler.operations.foresight import Foresight
from services.scheduler.operations.load_outcomes import LOAD_TRIES, VictimsStay, failure_note, outcome
from services.scheduler.operations.orders import wire_version
from services.scheduler.operations.partings import Partings
from services.scheduler.operations.pools import Pools
from services.scheduler.operations.waits import WaitBook
from services.scheduler.ports import AuditTrail, Instruments, LoaderFleet, SchedulingStore

log = structlog.get_logger(__name__)

HOLD_MS = 15_000  # claims and drain marks of a crashed replica end after this
RENEW_MS = 5_000
PERMISSION_MARGIN_MS = 3_000  # a guess: more than the clocks of two machines that keep time differ
FRESH_STATE_MS = 2_000  # how long to wait for the node's next state after a load: two of its periods
STUCK_CHECK_S = 0.5
VICTIM_PATIENCE_MS = 5_000  # five states of the node: an unload that Triton confirms takes well under a second
PLANS_MAX = 16  # plans one turn may act on: that many cold models begin to load at once
NEVER_MS = 2**52  # later than any deadline


@dataclass(slots=True)
class _Running:
    load: Load
    renewed_ms: int
    task: asyncio.Task[None] | None = None
    promoted: bool = False  # a pre-warm that a request has come to wait for, and whose loader was told so


class Residency:
    """The placement of one process, for all pools. `owner` names this process in claims."""

    def __init__(
        self,
        store: SchedulingStore,
        pools: Pools,
        loaders: LoaderFleet,
        dispatcher: Dispatcher,
        clock: Clock,
        instruments: Instruments,
        foresight: Foresight,
        audit: AuditTrail,
        waits: WaitBook,
        *,
        owner: str,
        policy: ResidencyPolicy,
        load_deadline_ms: int,
    ) -> None:
        self._store = store
        self._pools = pools
        self._loaders = loaders
        self._dispatcher = dispatcher
        self._clock = clock
        self._instruments = instruments
        self._foresight = foresight
        self._audit = audit
        self._waits = waits
        self._partings = Partings(store, pools, loaders, dispatcher, clock)
        self._owner = owner
        self._policy = policy
        self._load_deadline_ms = load_deadline_ms
        self._running: dict[tuple[PoolName, VersionKey], _Running] = {}
        self._one_at_a_time: dict[PoolName, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._asides: set[asyncio.Task[None]] = set()  # audit events and promotions on their way

    async def consider(self, pool: PoolName) -> None:
        """Plan and act until nothing more can be begun now. Raises Unavailable; what was begun ends by itself."""
        async with self._one_at_a_time[pool]:
            await self._renew(pool)
            for _ in range(PLANS_MAX):
                if not await self._consider_once(pool):
                    return

    async def _consider_once(self, pool: PoolName) -> bool:
        """One plan; whether it changed what the next one would be. A claim is only good for the plan it is from."""
        view = replace(await self._pools.refresh(pool), worth=self._foresight.worth(pool))
        self._instruments.observed(pool, view.state)
        now_ms = self._clock.now_ms()
        decided = plan(view, self._policy, now_ms)
        await self._refuse_hopeless(pool, view)
        for reopened in decided.reopen:
            await self._store.clear_drain(pool, reopened.instance, now_ms)
        for rotation in decided.rotations:
            await self._rotate(pool, rotation)
        await self._partings.go_on(pool, decided.partings)
        if decided.reopen:
            self._dispatcher.wake(pool)
            return True
        await self._waits.note(pool, view, decided, now_ms, actor=self._owner)
        self._promote(pool, view)
        if not decided.loads:
            return not decided.rotations and not decided.deferred and await self._prewarm(pool, view)
        return not decided.rotations and await self._begin(pool, decided.loads[0], view)

    async def _prewarm(self, pool: PoolName, view: PoolView) -> bool:
        """Begin the best load that the forecast asks for, one at a time a node; whether one was begun."""
        now_ms = self._clock.now_ms()
        loading = {claim.node_id for claim in view.state.loads.values() if claim.until_ms > now_ms}
        for planned in self._foresight.moves(view, pool):
            load = sited(view, planned, now_ms)
            if load is not None and load.node_id not in loading and await self._begin(pool, load, view):
                self._foresight.plan_again(pool)
                return True
        return False

    def _promote(self, pool: PoolName, view: PoolView) -> None:
        """Tell the loader of a pre-warm that a request waits for it now, so that it goes before other pre-warms."""
        for version in {depth.version for depth in view.state.depths}:
            running = self._running.get((pool, version))
            if running is not None and running.load.reason == "prewarm" and not running.promoted:
                running.promoted = True
                self._aside(self._join(replace(running.load, victims=(), reason="demand")))

    async def _join(self, load: Load) -> None:
        state = self._pools.nodes.state(load.node_id)
        if state is None:
            return
        try:
            await self._until_ready(state.loader_address, self._request(load))
        except RoundhouseError as error:
            log.info("promotion_failed", model=model_of(load.version), error=error.message)

    def _aside(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name="residency-aside")
        self._asides.add(task)
        task.add_done_callback(self._asides.discard)

    async def stop(self) -> None:
        """Stop following loads; they go on at their loaders, and other replicas see what becomes of them."""
        tasks = [each.task for each in self._running.values() if each.task is not None] + list(self._asides)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._partings.stop()

    async def _rotate(self, pool: PoolName, rotation: Rotate) -> None:
        await self._drain(pool, rotation.victim.instance, rotation.victim.version, rotation.purpose, rotate=True)

    async def _drain(
        self, pool: PoolName, instance: InstanceKey, version: VersionKey, purpose: VersionKey, *, rotate: bool
    ) -> bool:
        now_ms = self._clock.now_ms()
        order = DrainOrder(instance, version, purpose, now_ms + HOLD_MS, rotate)
        answer = await self._store.begin_drain(pool, order, now_ms)
        return isinstance(answer, Draining) and (rotate or answer.in_use == 0)

    async def _begin(self, pool: PoolName, load: Load, view: PoolView) -> bool:
        """Claim the load and close its victims; then follow it. Gives all back if a victim is used again: False."""
        now_ms, state = self._clock.now_ms(), view.state
        claim = LoadClaim(load.node_id, self._owner, now_ms + HOLD_MS, load.bytes, load.devices)
        order = ClaimOrder(load.version, claim, state.revision)
        if not isinstance(await self._store.claim_load(pool, order, now_ms), Claimed):
            return False
        closed = [
            await self._drain(pool, victim.instance, victim.version, load.version, rotate=False)
            for victim in load.victims
        ]
        if not all(closed):
            before = state.failures.get((load.version, load.node_id))
            await self._give_back(pool, load)
            await self._store.release_load(pool, load.version, load.node_id, self._owner, before, now_ms)
            return False
        self._tell_evictions(pool, load, view, now_ms)
        running = _Running(load, now_ms)
        self._running[(pool, load.version)] = running
        running.task = asyncio.create_task(self._follow(pool, load), name="load")
        return True

    def _tell_evictions(self, pool: PoolName, load: Load, view: PoolView, now_ms: int) -> None:
        node = next(each for each in view.nodes if each.node_id == load.node_id)
        for victim in load.victims:
            reason = self._foresight.explain_victim(pool, node, victim.version, now_ms)
            details = {"pool": pool, "node": load.node_id, "for": model_of(load.version), "because": load.reason}
            self._aside(
                self._audit.record(
                    "evict", actor=self._owner, subject=model_of(victim.version), reason=reason, details=details
                )
            )
            self._foresight.evicted(pool, node, victim.version, now_ms)

    async def _give_back(self, pool: PoolName, load: Load) -> None:
        for victim in load.victims:
            await self._store.clear_drain(pool, victim.instance, self._clock.now_ms(), load.version)

    async def _renew(self, pool: PoolName) -> None:
        now_ms = self._clock.now_ms()
        for (of, version), running in list(self._running.items()):
            if of != pool or now_ms - running.renewed_ms < RENEW_MS:
                continue
            running.renewed_ms = now_ms
            await self._store.renew_load(pool, version, self._owner, now_ms + HOLD_MS, now_ms)
            for victim in running.load.victims:
                await self._drain(pool, victim.instance, victim.version, version, rotate=False)

    async def _follow(self, pool: PoolName, load: Load) -> None:
        """One load from claim to release. Cancelled: the claim ends by itself, the load goes on at its loader."""
        failure: RoundhouseError | None = None
        begun_ms = self._clock.now_ms()
        try:
            until_ms = await self._send_victims(pool, load)
            await self._ensure_loaded(load, until_ms)
        except RoundhouseError as error:
            failure = error
        except Exception as error:
            log.exception("load_fault", model=model_of(load.version))
            failure = Unavailable(f"the scheduler failed: {type(error).__name__}")  # else the claim would stay for ever
        ended_ms = self._clock.now_ms()
        log.info(
            "load_ended", model=model_of(load.version), node=load.node_id, error=failure.message if failure else ""
        )
        self._instruments.load_ended(pool, model_of(load.version), outcome(failure))
        details = {
            "pool": pool,
            "node": load.node_id,
            "outcome": outcome(failure),
            "took_ms": str(ended_ms - begun_ms),
        }
        if failure is not None:
            details["error"] = failure.message
        self._aside(
            self._audit.record(
                "load", actor=self._owner, subject=model_of(load.version), reason=load.reason, details=details
            )
        )
        await self._await_fresh_state(load, failed=failure is not None, since_ms=ended_ms)
        try:
            await self._give_back(pool, load)
            note = failure_note(self._pools.view(pool), load, failure, self._clock.now_ms()) if failure else None
            await self._store.release_load(pool, load.version, load.node_id, self._owner, note, self._clock.now_ms())
        except Unavailable as error:
            log.warning("load_release_failed", model=model_of(load.version), error=error.message)
        finally:
            self._running.pop((pool, load.version), None)
        self._dispatcher.wake(pool)

    async def _send_victims(self, pool: PoolName, load: Load) -> int:
        """Make sure, right before the order, that the victims are still to leave. Raises CapacityExhausted if not.

        Returns until when the loader may let them go: before the marks end, and others use them (invariant 8)."""
        if not load.victims:
            return 0
        now_ms = self._clock.now_ms()
        victims = [victim.instance for victim in load.victims]
        try:
            sent = await self._store.send_drains(pool, load.version, victims, now_ms + HOLD_MS, now_ms)
        except Unavailable as error:
            raise CapacityExhausted("the store could not say whether the victims may leave") from error
        if not sent:
            raise CapacityExhausted("a request came for a model that was to leave")
        return now_ms + HOLD_MS - PERMISSION_MARGIN_MS

    async def _ensure_loaded(self, load: Load, unload_until_ms: int) -> None:
        state = self._pools.nodes.state(load.node_id)
        if state is None:
            raise Unavailable(f"node {load.node_id} has gone")
        log.info(
            "load_begun",
            model=model_of(load.version),
            node=load.node_id,
            victims=[model_of(victim.version) for victim in load.victims],
            reason=load.reason,
        )
        following = asyncio.create_task(
            self._until_ready(state.loader_address, self._request(load, unload_until_ms)), name="load-progress"
        )
        begun_ms = self._clock.now_ms()
        try:
            while not (await asyncio.wait([following], timeout=STUCK_CHECK_S))[0]:
                if self._clock.now_ms() - begun_ms >= VICTIM_PATIENCE_MS and self._victims_stay(load):
                    raise VictimsStay("what had to leave first does not leave")
            await following
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    def _request(self, load: Load, unload_until_ms: int = 0) -> loading_pb2.EnsureLoadedRequest:
        return loading_pb2.EnsureLoadedRequest(
            version=wire_version(load.version),
            generation=self._clock.now_ms(),  # later commands win, also after the store lost its memory
            # One that only changes hands stands there already: the loader answers at once that it is ready.
            unload_first=[
                wire_version(each.version) for each in load.victims if base_of(each.version) != base_of(load.version)
            ],
            deadline_ms=self._load_deadline_ms,
            reason=load.reason,
            devices=load.devices,
            alone_for=load.alone_for,
            unload_until_unix_ms=unload_until_ms,
        )

    def _victims_stay(self, load: Load) -> bool:
        """Whether the node still says that it unloads a victim: its Triton may never confirm it."""
        state = self._pools.nodes.state(load.node_id)
        leaving = {base_of(victim.version) for victim in load.victims}
        return state is not None and any(
            version_key(each.version.model, each.version.digest) in leaving
            and each.state == vocabulary_pb2.INSTANCE_STATE_UNLOADING
            for each in state.instances
        )

    async def _until_ready(self, address: str, request: loading_pb2.EnsureLoadedRequest) -> None:
        async for progress in self._loaders.ensure_loaded(address, request):
            if progress.state == vocabulary_pb2.INSTANCE_STATE_READY:
                return
        raise Unavailable("the loader ended its answer before the model was ready")

    async def _await_fresh_state(self, load: Load, *, failed: bool, since_ms: int) -> None:
        """Wait until the node's own word shows what the load left, at most `FRESH_STATE_MS`.

        A state that shows the version ready shows its victims gone; after a failure only victims matter."""
        for _ in range(FRESH_STATE_MS // 50):
            if self._pools.nodes.heard_since(load.node_id, since_ms):
                return
            if (failed and not load.victims) or (not failed and self._pools.is_ready(load.node_id, load.version)):
                return
            await self._clock.sleep_ms(50)

    async def _refuse_hopeless(self, pool: PoolName, view: PoolView) -> None:
        """Refuse what waits for a model that fails to load: all after `LOAD_TRIES`, else what ends before the next.

        What waits for a version that the catalogue does not name and no node serves any more is given back at once: its
        gateway asks again, for the version that took over (case B19)."""
        now_ms = self._clock.now_ms()
        for version in {depth.version for depth in view.state.depths}:
            spec = view.specs.get(version)
            if spec is None and not is_served(view, version):
                reason, message = RefusalReason.REPLACED, "another version of the model took over"
                gone = await self._store.refuse(pool, version, NEVER_MS, reason, message, now_ms)
                self._dispatcher.deliver(pool, gone)
            if spec is None or _is_claimed(view.state, version, now_ms):
                continue
            answer = viability(view, spec, now_ms)
            if not isinstance(answer, BackingOff):
                continue
            before_ms = NEVER_MS if answer.tries >= LOAD_TRIES else answer.retry_at_ms
            message = f"the model failed to load: {answer.cause}"
            refused = await self._store.refuse(pool, version, before_ms, RefusalReason.UNAVAILABLE, message, now_ms)
            self._dispatcher.deliver(pool, refused)


def _is_claimed(state: PoolState, version: VersionKey, now_ms: int) -> bool:
    claim = state.loads.get(version)
    return claim is not None and claim.until_ms > now_ms
