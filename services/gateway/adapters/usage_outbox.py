"""`UsageSink` on disk: an event is kept before its request's end is told, and until JetStream has it.

Invariants 13 and 14 need every event to arrive at least once: `record` returns when the event is in the log, publishing
is repeated until it is acknowledged, and the event's id makes repetitions harmless. A killed process leaves its events
in the log and its running attempts in their slots; the next one on the folder publishes both first, with the exact
counts. While `events_max` events wait, or the disk takes none, `has_room` is False and new requests are refused:
losing a bill is worse than refusing work. Without a folder (tests) everything is in memory only.
Decision: docs/decisions/0110-durable-outbox.md.
"""

import asyncio
import random
from collections import deque
from dataclasses import dataclass

import structlog

from roundhouse import subjects
from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from roundhouse.event_bus import EventBus
from roundhouse.lifecycle import Lifecycle
from roundhouse.wire.v1.scheduling_pb2 import Finished
from roundhouse.wire.v1.usage_pb2 import UsageEvent
from services.gateway.adapters.outbox import metrics
from services.gateway.adapters.outbox.attempt_slots import SlotJournal
from services.gateway.adapters.outbox.folder import OutboxFolder
from services.gateway.ports import AttemptJournal

log = structlog.get_logger(__name__)

EVENTS_MAX = 50_000  # about 50 MB with the log; some minutes of a busy gateway
ALARM_AT = 0.5  # of `events_max`: time to act before work is refused
PUBLISHERS = 16  # JetStream takes 11,000/s with many in flight, 3,600/s one at a time
RETRY_S_MIN, RETRY_S_MAX = 0.1, 2.0
PACE_S = 0.05  # between two groups of events: a message alone wakes three processes, and so does a group
UPKEEP_MS = 200  # what a power cut may take of events that the stream does not have; a killed process loses nothing


@dataclass(slots=True, eq=False)
class _Held:
    """An event that the stream does not have yet. `segment` None: it is not on disk either, because that failed."""

    event_id: str
    subject: str
    message_id: str
    data: bytes
    segment: int | None = None


class _NoJournal:
    """For an attempt without a slot: the scheduler's last heartbeat stands for it."""

    def note(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """Kept nowhere."""


class UsageOutbox:
    """See the module. `take_over` and `start` it, and `drain` it before the bus closes."""

    def __init__(self, bus: EventBus, *, events_max: int = EVENTS_MAX, folder: OutboxFolder | None = None) -> None:
        self._bus = bus
        self._events_max = events_max
        self._folder = folder
        self._held: dict[str, _Held] = {}
        self._slots: dict[str, SlotJournal] = {}
        self._unwritten: deque[_Held] = deque()
        self._waiting: asyncio.Queue[_Held] = asyncio.Queue()  # bounded by `has_room`, never by losing an event
        self._gathered: list[_Held] = []  # on disk, and about to go into `_waiting`
        self._opens: asyncio.TimerHandle | None = None  # until it rings, events gather
        self._paced = True
        self._drained = asyncio.Event()
        self._drained.set()
        self._dirty = False
        self._disk_fault = ""
        self._alarmed = ""

    def __len__(self) -> int:
        return len(self._held)

    @property
    def has_room(self) -> bool:
        """See `UsageSink.has_room`."""
        return len(self._held) < self._events_max and not self._unwritten

    @property
    def full_reason(self) -> str:
        """See `UsageSink.full_reason`."""
        if self._unwritten:
            return "the outbox of usage events cannot be written."
        return "" if self.has_room else f"{len(self._held)} usage events wait for the event stream."

    @property
    def alarm(self) -> str | None:
        """What an operator should look at; None while all is well. A condition of readiness."""
        if self._disk_fault:
            return f"usage events cannot be written to disk: {self._disk_fault}"
        waiting = len(self._held)
        if waiting >= self._events_max * ALARM_AT:
            return f"{waiting} of at most {self._events_max} usage events wait for the stream"
        return None

    def take_over(self, now_ms: int) -> list[Finished]:
        """Queue what earlier processes left; returns the finishes of their running attempts, for the scheduler.

        Raises Unavailable if the folder cannot be read."""
        if self._folder is None:
            return []
        left = self._folder.take_over(now_ms)
        for event, segment in left.events:
            if event.id in self._held:  # kept twice by one that was killed while it took over; the first copy stays
                self._folder.log.acknowledge(segment)
                continue
            self._waiting.put_nowait(self._hold(event, event.SerializeToString(), segment))
        metrics.recovered(len(left.events), len(left.finishes), left.damaged, left.torn)
        if left.events or left.damaged or left.torn:
            counts = {"events": len(left.events), "abandoned": len(left.finishes), "torn": left.torn}
            log.warning("usage_outbox_recovered", **counts, damaged=left.damaged)
        return left.finishes

    def begin(self, started: UsageEvent, pool: str) -> AttemptJournal:
        """See `UsageSink.begin`."""
        slot = self._folder.begin(started, pool) if self._folder is not None else None
        if slot is None:
            return _NoJournal()
        self._slots[started.id] = slot
        return slot

    async def record(self, event: UsageEvent) -> None:
        """See `UsageSink.record`. Never waits: one write into the page cache, a few microseconds."""
        if event.id in self._held:
            return
        held = self._hold(event, event.SerializeToString(), None)
        if self._folder is not None and not self._write(self._folder, held):
            self._unwritten.append(held)
        self._gathered.append(held)
        if self._opens is None:
            self._let_go()

    def start(self, lifecycle: Lifecycle, clock: Clock) -> None:
        """Publish and look after the log in the background until the process stops."""
        for number in range(PUBLISHERS):
            lifecycle.spawn(self._publish_forever(), f"usage_outbox_{number}")
        lifecycle.every(UPKEEP_MS, lambda: self._upkeep(clock), "usage_outbox_upkeep")

    async def drain(self, timeout_s: float) -> int:
        """Wait until the stream has everything; returns how many events are left after `timeout_s`, for the next
        process on the folder."""
        self._paced = False
        if self._opens is not None:
            self._opens.cancel()
        self._let_go()
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
        except TimeoutError:
            log.error("usage_events_left", events=len(self._held), on_disk=self._folder is not None)
        if self._folder is not None and not self._held:
            self._folder.log.trim()
        return len(self._held)

    def close(self) -> None:
        """Let go of the folder. Call last. Idempotent."""
        if self._folder is not None:
            self._folder.close()

    def _hold(self, event: UsageEvent, data: bytes, segment: int | None) -> _Held:
        # The emitter is part of the message id: the stream must not take this event for a repetition of the
        # scheduler's settlement of the same attempt, which it supersedes.
        held = _Held(event.id, subjects.usage(event.subject), f"{event.id}/{event.data.emitter}", data, segment)
        self._held[event.id] = held
        self._drained.clear()
        return held

    def _let_go(self) -> None:
        """Publish what has gathered, and gather for `PACE_S`: the first event after a pause goes at once."""
        self._opens = None
        if not self._gathered:
            return
        for held in self._gathered:
            self._waiting.put_nowait(held)
        self._gathered.clear()
        if self._paced:
            self._opens = asyncio.get_running_loop().call_later(PACE_S, self._let_go)

    def _write(self, folder: OutboxFolder, held: _Held) -> bool:
        """Into the log, then out of the slot. False if the disk refuses; then the slot still has the counts."""
        try:
            held.segment = folder.log.append(held.data)
        except OSError as error:
            self._disk_fault = error.strerror or type(error).__name__
            return False
        self._dirty = True
        slot = self._slots.pop(held.event_id, None)
        if slot is not None:
            folder.slots.give_back(slot.number)
        return True

    async def _publish_forever(self) -> None:
        while True:
            held = await self._waiting.get()
            await self._publish(held)
            del self._held[held.event_id]
            if held.segment is not None and self._folder is not None:
                self._folder.log.acknowledge(held.segment)
            if not self._held:
                self._drained.set()

    async def _publish(self, held: _Held) -> None:
        wait_s = RETRY_S_MIN
        while True:
            try:
                await self._bus.publish_durable(held.subject, held.data, message_id=held.message_id)
                return
            except Unavailable:
                log.info("usage_event_delayed", event_id=held.event_id)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1))  # noqa: S311 - jitter, not a secret
            wait_s = min(wait_s * 2, RETRY_S_MAX)

    async def _upkeep(self, clock: Clock) -> None:
        if self._folder is not None:
            await self._keep_folder(self._folder, clock)
        metrics.waiting(len(self._held), len(self._unwritten))
        reason = self.alarm or ""
        if bool(reason) != bool(self._alarmed):
            log.error("usage_outbox_alarm", reason=reason) if reason else log.info("usage_outbox_well")
        self._alarmed = reason

    async def _keep_folder(self, folder: OutboxFolder, clock: Clock) -> None:
        folder.slots.alive_ms = clock.now_ms()
        while self._unwritten:
            held = self._unwritten[0]
            if held.event_id in self._held and not self._write(folder, held):
                break
            if held.event_id not in self._held:  # the stream has it meanwhile
                self._release_slot(folder, held.event_id)
            self._unwritten.popleft()
        try:
            if self._dirty:
                self._dirty = False
                await asyncio.to_thread(folder.log.syncing())
            if not self._held:
                folder.log.trim()
        except OSError as error:
            self._disk_fault = error.strerror or type(error).__name__
            return
        if not self._unwritten:
            self._disk_fault = ""

    def _release_slot(self, folder: OutboxFolder, event_id: str) -> None:
        slot = self._slots.pop(event_id, None)
        if slot is not None:
            folder.slots.give_back(slot.number)
