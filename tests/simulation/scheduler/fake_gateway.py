"""A gateway as the scheduler meets it: submits, streams, reports, and counts how each request ended (invariant 1)."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from roundhouse import subjects
from roundhouse.catalogue.records import Model
from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from roundhouse.event_bus import EventBus, Message
from roundhouse.vocabulary import PriorityClass
from roundhouse.wire.v1 import scheduling_pb2 as wire
from roundhouse.wire.v1 import vocabulary_pb2
from services.gateway.operations.submission import SUBMIT_TRIES
from tests.simulation.scheduler.mesh import POOL, FakeNode

_ENDINGS = {
    vocabulary_pb2.OUTCOME_DONE: "done",
    vocabulary_pb2.OUTCOME_FAILED: "failed",
    vocabulary_pb2.OUTCOME_CANCELLED: "cancelled",
}


@dataclass
class Asked:
    """One request as its client sees it."""

    request: wire.SubmitRequest
    run_ms: int = 100
    output_tokens: int = 10
    endings: list[str] = field(default_factory=list)
    submitted_ms: int = 0
    granted_ms: int = 0
    ended_ms: int = 0
    accepted: bool = False
    grant: wire.Grant | None = None


@dataclass
class FakeGateway:
    """Submits, streams for `run_ms`, reports. `crash` stops everything at once, without a word."""

    bus: EventBus
    clock: Clock
    nodes: dict[str, FakeNode]
    gateway_id: str = "g1"
    asked: dict[tuple[str, int], Asked] = field(default_factory=dict)
    crashed: bool = False
    broken_at_end: set[str] = field(default_factory=set)  # requests that find their instance dead when they end
    finished: list[tuple[int, wire.Finished]] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _started: set[tuple[str, int]] = field(default_factory=set)
    _runs: dict[tuple[str, int], asyncio.Future[None]] = field(default_factory=dict)
    _hung_up: set[tuple[str, int]] = field(default_factory=set)

    async def start(self) -> None:
        """Listen for grants."""
        await self.bus.subscribe(subjects.gateway_grant(self.gateway_id), self._on_delivery, concurrency=64)

    def ask(self, request_id: str, model: Model, **fields: object) -> Asked:
        """Make a request; not sent yet."""
        values: dict[str, object] = {
            "request_id": request_id,
            "attempt": 1,
            "gateway_id": self.gateway_id,
            "tenant_id": "t1",
            "model": model.name,
            "model_digest": model.digest,
            "priority_class": PriorityClass.STANDARD.to_wire(),
            "input_tokens": 10,
            "max_output_tokens": 10,
            "deadline_unix_ms": self.clock.now_ms() + 120_000,
            "pool": POOL,
        }
        run_ms = int(str(fields.pop("run_ms", 100)))
        return Asked(wire.SubmitRequest(**(values | fields)), run_ms)  # type: ignore[arg-type]

    async def submit(self, asked: Asked) -> wire.SubmitReply | None:
        """Send; None if nobody answered even the last time (then the client was told so)."""
        key = (asked.request.request_id, asked.request.attempt)
        self.asked[key] = asked
        asked.submitted_ms = self.clock.now_ms()
        task = asyncio.create_task(self._watch_deadline(asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        for timeout_ms, to_all in SUBMIT_TRIES:
            subject = subjects.WORK_SUBMIT_TO_ALL if to_all else subjects.WORK_SUBMIT
            try:
                data = await self.bus.request(subject, asked.request.SerializeToString(), timeout_ms=timeout_ms)
            except Unavailable:
                await self.clock.sleep_ms(100)
                continue
            reply = wire.SubmitReply.FromString(data)
            asked.accepted = reply.WhichOneof("result") == "accepted"
            if not asked.accepted and not asked.endings:
                self._end(asked, "refused")
            return reply
        if not asked.endings and key not in self._started:
            await self.cancel(asked)
        return None

    async def _watch_deadline(self, asked: Asked) -> None:
        """The gateway's own guard, for when the scheduler's word is lost; later than the real one, to see that word."""
        await self.clock.sleep_ms(asked.request.deadline_unix_ms + 800 - self.clock.now_ms())
        key = (asked.request.request_id, asked.request.attempt)
        if not asked.endings and key not in self._started:
            await self.cancel(asked, "expired")

    async def cancel(self, asked: Asked, how: str = "cancelled") -> None:
        """The client leaves, or the deadline passes."""
        self._end(asked, how)
        cancel = wire.Cancel(
            request_id=asked.request.request_id, attempt=asked.request.attempt, gateway_id=self.gateway_id, pool=POOL
        )
        await self.bus.publish(subjects.WORK_CANCEL, cancel.SerializeToString())

    def crash(self) -> None:
        """End without a word; its streams end with it."""
        self.crashed = True
        for task in self._tasks:
            task.cancel()

    async def live(self) -> None:
        """Heartbeat each second; end what is past its deadline, as the real gateway does."""
        while not self.crashed:
            now_ms = self.clock.now_ms()
            self.finished = [(at, each) for at, each in self.finished if now_ms - at < 5_000]
            beat = wire.Heartbeat(gateway_id=self.gateway_id, sent_unix_ms=now_ms)
            for key in self._started:
                asked = self.asked[key]
                if not asked.endings:
                    beat.leases.add(request_id=key[0], attempt=key[1], pool=POOL, input_tokens=10, output_tokens=1)
            beat.finished.extend(each for _, each in self.finished)
            await self.bus.publish(subjects.WORK_HEARTBEAT, beat.SerializeToString())
            await self.clock.sleep_ms(1_000)

    async def _on_delivery(self, message: Message) -> bytes | None:
        if self.crashed:
            return None
        delivery = wire.GrantDelivery.FromString(message.data)
        what = delivery.grant if delivery.WhichOneof("what") == "grant" else delivery.rejection
        key = (what.request_id, what.attempt)
        asked = self.asked.get(key)
        wanted = asked is not None and (not asked.endings or key in self._started)
        if asked is not None and wanted and key not in self._started:
            if isinstance(what, wire.Rejection):
                self._end(asked, wire.Refused.Reason.Name(what.refused.reason))
            else:
                self._started.add(key)
                asked.granted_ms, asked.grant = self.clock.now_ms(), what
                task = asyncio.create_task(self._stream(asked, what))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        return wire.GrantAck(wanted=wanted).SerializeToString()

    async def _stream(self, asked: Asked, grant: wire.Grant) -> None:
        node, name = self.nodes[grant.placements[-1].node_id], asked.request.model
        outcome = vocabulary_pb2.OUTCOME_DONE
        broken = name in node.dead
        request_id = asked.request.request_id
        if broken or name not in node.ready:
            outcome = vocabulary_pb2.OUTCOME_FAILED
        else:
            node.now_running[name] += 1
            node.together_max[name] = max(node.together_max[name], node.now_running[name])
            try:
                outcome = await self._run(asked)
            finally:
                node.now_running[name] -= 1
        if request_id in self.broken_at_end:
            broken, outcome = True, vocabulary_pb2.OUTCOME_FAILED
        self._end(asked, _ENDINGS[outcome])
        report = wire.Finished(
            request_id=asked.request.request_id,
            attempt=asked.request.attempt,
            pool=POOL,
            outcome=outcome,
            input_tokens=asked.request.input_tokens,
            output_tokens=asked.output_tokens,
            run_ms=asked.run_ms if request_id in self.broken_at_end or not broken else 0,
            instance_broken=broken,
            node_id=node.node_id,
            first_token_ms=node.first_token_ms,
        )
        self.finished.append((self.clock.now_ms(), report))
        await self.bus.publish(subjects.WORK_FINISHED, report.SerializeToString())

    async def _run(self, asked: Asked) -> "vocabulary_pb2.Outcome.ValueType":
        key = (asked.request.request_id, asked.request.attempt)
        self._runs[key] = run = asyncio.ensure_future(self.clock.sleep_ms(asked.run_ms))
        try:
            await run
        except asyncio.CancelledError:
            if key not in self._hung_up:
                raise
            return vocabulary_pb2.OUTCOME_CANCELLED
        finally:
            del self._runs[key]
        return vocabulary_pb2.OUTCOME_DONE

    def hang_up(self, asked: Asked) -> None:
        """The client leaves amid its stream."""
        key = (asked.request.request_id, asked.request.attempt)
        self._hung_up.add(key)
        self._runs[key].cancel()

    def _end(self, asked: Asked, how: str) -> None:
        asked.endings.append(how)
        asked.ended_ms = self.clock.now_ms()

    def outcomes(self) -> Counter[str]:
        """How many ended in which way; every request has ended exactly once (invariant 1)."""
        for asked in self.asked.values():
            assert len(asked.endings) == 1, f"{asked.request.request_id} ended {asked.endings}"
        return Counter(asked.endings[0] for asked in self.asked.values())
