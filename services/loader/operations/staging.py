"""One staging of a version: from its source to disk, and on to host memory if its engine reads from there.

Whoever wants the same weights joins the one that goes on (invariant 7) and lends it his priority; when the last one
leaves, it stops and nothing of it stays. A source that sends nothing for too long ends it with that cause.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field

from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from roundhouse.vocabulary import Digest
from services.loader.domain.rates import Moving, Rates, Way
from services.loader.domain.staging_priority import Priority
from services.loader.operations.traffic import Traffic, TrafficLane

WATCH_MS = 500  # how late a stall is seen


@dataclass(slots=True)
class Leg:
    """One way of a staging: how much of it is done."""

    total: int = 0
    done: int = 0
    began_ms: int = 0  # monotonic; 0 = not begun

    def remaining_ms(self, way: Way, rates: Rates, now_ms: int) -> int | None:
        """How long it still takes, as far as one can tell."""
        elapsed_ms = now_ms - self.began_ms if self.began_ms else 0
        return Moving(self.done, self.total, elapsed_ms).remaining_ms(rates.remaining_ms(way, self.total))


@dataclass(slots=True)
class Staging:
    """A staging that goes on. `legs` are what callers see of it."""

    digest: Digest
    priority: Priority
    keys: frozenset[str] = frozenset()  # contents that it brings to disk
    legs: dict[Way, Leg] = field(default_factory=lambda: {Way.TO_DISK: Leg(), Way.TO_HOST: Leg()})
    lane: TrafficLane | None = None
    waits_for: "Staging | None" = None
    waiters: int = 0
    task: "asyncio.Task[None] | None" = None

    def promote(self, priority: Priority) -> None:
        """Somebody with this priority joined."""
        self.priority = min(self.priority, priority)
        if self.lane is not None:
            self.lane.promote(priority)
        if self.waits_for is not None:
            self.waits_for.promote(priority)

    @property
    def is_given_up(self) -> bool:
        """Whether the last one who took part has left, and it only has to stop."""
        return self.task is not None and self.task.cancelling() > 0

    @property
    def bytes_done(self) -> int:
        """Of all its ways."""
        return sum(leg.done for leg in self.legs.values())

    @property
    def bytes_total(self) -> int:
        """Of all its ways, as far as they are known."""
        return sum(leg.total for leg in self.legs.values())

    def remaining_ms(self, rates: Rates, now_ms: int) -> int | None:
        """Until it is staged; None if nothing is known of a way."""
        left = [leg.remaining_ms(way, rates, now_ms) for way, leg in self.legs.items() if leg.total > leg.done]
        known = [each for each in left if each is not None]
        return sum(known) if len(known) == len(left) else None


Work = Callable[[Staging, TrafficLane], Awaitable[None]]


class Stagings:
    """All stagings of one node."""

    def __init__(self, clock: Clock, stall_ms: int, bytes_per_s: int = 0) -> None:
        """`bytes_per_s`: the most for all that no request waits for; 0 = no limit."""
        self._clock = clock
        self._stall_ms = stall_ms
        self._traffic = Traffic(bytes_per_s)
        self._running: dict[Digest, Staging] = {}

    def find(self, digest: Digest) -> Staging | None:
        """The staging of a version that goes on now."""
        return self._running.get(digest)

    def digests(self) -> Collection[Digest]:
        """Versions that are being staged."""
        return self._running.keys()

    def moving(self) -> tuple[int, int]:
        """(done, in all) bytes of all of them."""
        running = self._running.values()
        return sum(each.bytes_done for each in running), sum(each.bytes_total for each in running)

    async def join(self, digest: Digest, priority: Priority, work: Work) -> None:
        """Take part in the staging of `digest`, begun by `work` if nobody has. Raises what `work` raises.

        Cancelled: leaves; the last one to leave ends it, and waits until it has ended. So its task is never orphaned:
        it lives no longer than those who joined."""
        while (staging := self._running.get(digest)) is not None and staging.is_given_up:
            assert staging.task is not None
            await asyncio.wait({staging.task})  # it would end this caller too
        if staging is None:
            staging = self._begin(digest, priority, work)
        staging.promote(priority)
        assert staging.task is not None
        staging.waiters += 1
        try:
            await asyncio.shield(staging.task)
        finally:
            staging.waiters -= 1
            if staging.waiters == 0 and not staging.task.done():
                staging.task.cancel()
                await asyncio.wait({staging.task})

    async def yield_to(self, staging: Staging) -> None:
        """Wait for stagings that bring contents which this one needs too, and lend them its priority."""
        while (other := self._earlier(staging)) is not None:
            staging.waits_for = other
            other.promote(staging.priority)
            assert other.task is not None
            await asyncio.wait({other.task})
        staging.waits_for = None

    def _earlier(self, staging: Staging) -> Staging | None:
        """One that began before and brings some of the same; those that came later wait for this one."""
        for other in self._running.values():
            if other is staging:
                return None
            if other.keys & staging.keys:
                return other
        return None

    def _begin(self, digest: Digest, priority: Priority, work: Work) -> Staging:
        staging = Staging(digest, priority)
        self._running[digest] = staging
        staging.task = asyncio.create_task(self._run(staging, work), name=f"stage {digest[:19]}")
        staging.task.add_done_callback(_seen)
        return staging

    async def _run(self, staging: Staging, work: Work) -> None:
        try:
            with self._traffic.lane(staging.priority) as lane:
                staging.lane = lane
                await self._unless_stalled(staging, lane, work)
        finally:
            del self._running[staging.digest]

    async def _unless_stalled(self, staging: Staging, lane: TrafficLane, work: Work) -> None:
        doing = asyncio.ensure_future(work(staging, lane))
        seen, seen_ms = staging.bytes_done, self._clock.monotonic_ms()
        try:
            while not (await asyncio.wait({doing}, timeout=WATCH_MS / 1000))[0]:
                now_ms = self._clock.monotonic_ms()
                moves = staging.bytes_done != seen or not lane.is_open or staging.waits_for is not None
                if moves:
                    seen, seen_ms = staging.bytes_done, now_ms
                elif now_ms - seen_ms >= self._stall_ms:
                    raise Unavailable(f"the source sent nothing for {self._stall_ms / 1000:g} s")
            doing.result()
        finally:
            if not doing.done():
                doing.cancel()
                await asyncio.wait({doing})


def _seen(task: "asyncio.Task[None]") -> None:
    """Its error belongs to those who joined; if all of them left, to nobody."""
    if not task.cancelled():
        task.exception()
