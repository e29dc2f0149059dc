"""The two orders a loader takes: make a version ready, and make it go away.

An order is recorded at once and the work goes on by itself; a caller only follows it. So N callers of a cold version
share one load and all see its progress (invariant 7, case B17), and a caller that leaves stops nothing. An older
generation is refused; a newer opposite order ends the wait of the older one with Conflict.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import structlog

from roundhouse.clock import Clock
from roundhouse.errors import Conflict, DeadlinePassed, EngineFailed, NotFound, Unavailable
from services.loader.domain import instance as words
from services.loader.domain.device_ledger import Site
from services.loader.domain.instance import BackingOff, Instance, Moved, Order, Stale, State, Step
from services.loader.domain.staging_priority import Priority
from services.loader.domain.versions import ModelVersion
from services.loader.operations.node import Node, Residence
from services.loader.operations.progress import Progress, ProgressGauge
from services.loader.operations.steps import Steps
from services.loader.ports import ModelLibrary

log = structlog.get_logger(__name__)

OPERATOR = "operator"
"""The reason of orders by people: they do not wait for the pause after a failure."""
BROKEN = "broken"
"""The reason of an unload because the model's process died: Triton may never confirm it, and holds nothing any more."""
IDLE = "idle"
"""The reason of an order that unloads nothing: nobody uses a version that leaves, so it may be ended if it stays."""
STUCK_MS = 5_000
"""A failed load whose memory Triton still holds is told to its callers after this time; its bytes stay held."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """EnsureLoaded. Generation 0 means "after whatever is known"; deadline 0 means none of the caller's own."""

    version: ModelVersion
    generation: int
    unload_first: tuple[ModelVersion, ...] = ()
    deadline_ms: int = 0  # from now
    reason: str = ""
    devices: Site = ()  # to stand on; empty = the loader chooses
    alone_for: str = ""  # token of the tenant that has them alone; empty = they are shared
    unload_until_ms: int = 0  # Unix time; later nobody may leave for it any more. 0 = no end


@dataclass(frozen=True, slots=True)
class UnloadOrder:
    """EnsureUnloaded."""

    version: ModelVersion
    generation: int
    deadline_ms: int = 0
    reason: str = ""


class Orders:
    """Takes orders and follows them."""

    def __init__(self, node: Node, steps: Steps, library: ModelLibrary, gauge: ProgressGauge, clock: Clock) -> None:
        self._node = node
        self._steps = steps
        self._library = library
        self._gauge = gauge
        self._clock = clock

    async def ensure_loaded(self, order: LoadOrder) -> AsyncIterator[Progress]:
        """Make a version ready; yields progress and ends when it is READY. Idempotent; cancelling stops no load.

        Raises NotFound (not in the catalogue), Conflict (a newer order is known, or came), InvalidInput with code
        NEVER_FITS, CapacityExhausted (no room beside what may not leave), EngineFailed (it cannot be loaded; with the
        cause, and when to try again), DeadlinePassed, Unavailable (draining, Triton away, or the node lost it)."""
        home = self._home_for(order.version)
        if home.instance.state is not State.READY and not self._node.accepting:
            raise Unavailable(self._node.not_accepting_reason)
        self._note(home, order)
        generation = order.generation or home.instance.generation + 1
        command = words.LoadCommanded(generation, force=order.reason == OPERATOR)
        self._expect_taken(self._steps.take(order.version, command))
        async for progress in self._follow_load(home, self._deadline(order.deadline_ms)):
            yield progress

    async def ensure_unloaded(self, order: UnloadOrder) -> bool:
        """Make a version go away; returns whether it was here, once its memory is free. Idempotent.

        With the reason `IDLE` it only takes note, at once.

        Raises Conflict, DeadlinePassed (the unload goes on)."""
        home = self._node.residences.get(order.version)
        if home is None:
            return False
        was_loaded = not home.instance.state.is_at_rest
        if order.reason == IDLE:
            home.idle = home.instance.state in (State.DRAINING, State.UNLOADING)
            return was_loaded
        generation = order.generation or home.instance.generation + 1
        home.reason = order.reason
        self._expect_taken(self._steps.take(order.version, words.UnloadCommanded(generation)))
        if home.staging is not None and not home.instance.wanted:
            home.staging.cancel()
        if order.reason == BROKEN and not home.instance.state.is_at_rest:
            self._node.dead.add(home.triton_name)
        deadline_ms = self._deadline(order.deadline_ms)
        while True:
            changed = self._node.progress.next()
            if home.instance.order is Order.LOAD:
                raise Conflict("a newer order wants it loaded")
            if home.instance.state.is_at_rest:
                return was_loaded
            self._check_deadline(deadline_ms, "it is still unloading")
            await self._wait(changed, deadline_ms)

    def _note(self, home: Residence, order: LoadOrder) -> None:
        """What a load needs to know of its caller; one that has begun takes over what a later caller adds.

        A permission that came too late is none: whoever gave it may have slept since, and others use the instances."""
        if 0 < order.unload_until_ms < self._clock.now_ms() and order.unload_first:
            log.warning("permission_too_late", model=order.version.model, victims=len(order.unload_first))
            order = replace(order, unload_first=())
        if home.instance.state.is_at_rest or home.instance.state is State.UNLOADING:
            home.unload_first, home.reason = order.unload_first, order.reason
            home.wanted_site, home.alone_for = order.devices, order.alone_for
            return
        home.unload_first = tuple(dict.fromkeys((*order.unload_first, *home.unload_first)))
        if Priority.of_reason(order.reason) < Priority.of_reason(home.reason):
            home.reason = order.reason
        self._gauge.promote(order.version.digest, Priority.of_reason(order.reason))

    async def _follow_load(self, home: Residence, deadline_ms: int | None) -> AsyncIterator[Progress]:
        attempt = home.instance.attempt
        last: Progress | None = None
        while True:
            changed = self._node.progress.next()
            self._raise_outcome(home, attempt)
            progress = self._gauge.read(home)
            if progress != last:
                yield progress
                last = progress
            if progress.state is State.READY:
                return  # not if it became ready while the caller took the one before: he wants to hear of it
            self._check_deadline(deadline_ms, "it is not ready yet")
            await self._wait(changed, _soonest(deadline_ms, self._stuck_at_ms(home.instance)))

    def _raise_outcome(self, home: Residence, attempt: int) -> None:
        """Raise if the load that a caller follows has ended without success."""
        now = home.instance
        if now.order is Order.UNLOAD:
            raise Conflict("a newer order unloads it")
        if home.refusal is not None and home.refused_attempt >= max(attempt, now.attempt):
            raise home.refusal
        stuck_at_ms = self._stuck_at_ms(now)
        stuck = stuck_at_ms is not None and self._clock.monotonic_ms() >= stuck_at_ms
        if now.state is State.FAILED or stuck:
            raise self._load_failure(now)
        if now.state in (State.REGISTERED, State.STAGED):
            raise Unavailable("the node does not have it any more")

    def _stuck_at_ms(self, instance: Instance) -> int | None:
        """On the monotonic clock, when the callers of a failed load that holds its memory are told."""
        if instance.state is not State.UNLOADING or not instance.reason:
            return None
        return self._clock.monotonic_ms() - self._clock.now_ms() + instance.since_ms + STUCK_MS

    def _load_failure(self, instance: Instance) -> EngineFailed:
        wait_ms = max(1, instance.retry_at_ms - self._clock.now_ms())
        return EngineFailed(instance.reason, code="load_failed", retry_after_ms=wait_ms)

    def _expect_taken(self, step: Step) -> None:
        match step:
            case Moved():
                return
            case Stale(known_generation):
                raise Conflict(f"generation {known_generation} of this version is known here already")
            case BackingOff(reason, retry_at_ms):
                wait_ms = max(1, retry_at_ms - self._clock.now_ms())
                raise EngineFailed(reason, code="load_failed", retry_after_ms=wait_ms)

    def _home_for(self, version: ModelVersion) -> Residence:
        known = self._node.residences.get(version)
        try:
            return self._node.settle_in(version, self._library.find(version))
        except NotFound:
            if known is not None and known.instance.state is State.READY:
                return known  # an older version that still serves
            raise

    def _deadline(self, deadline_ms: int) -> int | None:
        return self._clock.monotonic_ms() + deadline_ms if deadline_ms > 0 else None

    def _check_deadline(self, deadline_ms: int | None, what: str) -> None:
        if deadline_ms is not None and self._clock.monotonic_ms() >= deadline_ms:
            raise DeadlinePassed(f"the deadline passed: {what}")

    async def _wait(self, changed: asyncio.Event, until_ms: int | None) -> None:
        """Wait for the next change, at most until `until_ms` on the monotonic clock."""
        left_s = None if until_ms is None else max(0, until_ms - self._clock.monotonic_ms()) / 1000
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await changed.wait()


def _soonest(*moments: int | None) -> int | None:
    return min((moment for moment in moments if moment is not None), default=None)
