"""What a node says of itself, when, and what its metrics may grow to."""

import asyncio

from prometheus_client import generate_latest

from roundhouse import telemetry
from roundhouse.errors import NotFound, Unavailable
from roundhouse.event_bus import EventBus
from roundhouse.vocabulary import NodeId
from roundhouse.wire.v1 import events_pb2, loading_pb2, vocabulary_pb2
from services.loader.adapters.metrics import PrometheusMeasurements
from services.loader.adapters.nats_node import BusAuditTrail
from services.loader.operations.describe import Identity
from services.loader.operations.tell import Announcer
from services.loader.ports import AuditNote
from tests.builders.small_node import KeptMeasurements, SmallNode, small_model, small_node, version_of
from tests.fakes.clock import VirtualClock, run_virtual
from tests.fakes.event_bus import FakeBus

A = small_model("a")
IDENTITY = Identity("n1", "incarnation", "shared", vocabulary_pb2.NODE_ROLE_MIXED, "triton:1", "loader:2", "kv:3")


class KeptStates:
    """`StateSink` in lists; `keeps_after_s` makes the bucket slow, `away` makes it fail."""

    def __init__(self) -> None:
        self.published: list[loading_pb2.NodeState] = []
        self.kept: list[loading_pb2.NodeState] = []
        self.keeps_after_s = 0.0
        self.away = False

    async def publish(self, state: loading_pb2.NodeState) -> None:
        """See `StateSink.publish`."""
        if self.away:
            raise Unavailable("the bus takes no message now")
        self.published.append(state)

    async def keep(self, state: loading_pb2.NodeState) -> None:
        """See `StateSink.keep`."""
        await asyncio.sleep(self.keeps_after_s)
        self.kept.append(state)


async def telling(node: SmallNode, sink: KeptStates, duration_s: float) -> None:
    """Run both loops for some time."""
    announcer = Announcer(node.node, IDENTITY, node.gauge, sink, KeptMeasurements(), node.clock)
    loops = [asyncio.create_task(announcer.publish_states()), asyncio.create_task(announcer.keep_states())]
    await asyncio.sleep(duration_s)
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)


def test_twice_a_second_and_at_once_on_change() -> None:
    """Three quiet seconds are 7 messages (0, 0.5, … 3 s); READY is told in the millisecond it happens."""

    async def work() -> None:
        async with small_node((A,)) as node:
            sink = KeptStates()
            await telling(node, sink, 3.4)
            assert len(sink.published) == 7
            told = asyncio.create_task(telling(node, sink, 2))
            await asyncio.sleep(0.3)
            await node.load(A)
            await asyncio.sleep(0.001)
            assert sink.published[-1].instances[0].state == vocabulary_pb2.INSTANCE_STATE_READY
            await told

    run_virtual(work())


def test_a_slow_bucket_delays_no_announcement() -> None:
    """The bucket takes 10.3 s for each value: it gets the newest each time, and publishing goes on."""

    async def work() -> None:
        async with small_node((A,)) as node:
            sink = KeptStates()
            sink.keeps_after_s = 10.3
            await telling(node, sink, 30.4)
            assert len(sink.published) == 61
            assert [state.sequence for state in sink.kept] == [1, 21]  # begun at 0 and 10.3 s; the third is under way

    run_virtual(work())


def test_a_state_that_was_not_published_is_told_again() -> None:
    """The bus is away for two seconds; the next turn tells the state as it is then."""

    async def work() -> None:
        async with small_node((A,)) as node:
            sink = KeptStates()
            sink.away = True
            told = asyncio.create_task(telling(node, sink, 3.4))
            await asyncio.sleep(2.4)
            sink.away = False
            await told
            assert [state.sequence for state in sink.published] == [6, 7]  # at 2.5 and 3 s; 0 to 2 s were lost

    run_virtual(work())


def test_metric_series_are_bounded_by_the_catalogue() -> None:
    """B45, invariant 17: a hundred unknown names make no series; the model of the catalogue has its own."""

    async def work() -> None:
        async with small_node((A,)) as node:
            measurements = PrometheusMeasurements()
            await node.load(A)
            for model, outcome in node.measurements.loads:
                measurements.load_ended(A.name, outcome)
                assert model == A.name
            before = len(generate_latest(telemetry.REGISTRY).splitlines())
            for number in range(100):
                try:
                    await node.load(small_model(f"made-up-{number}"))
                except NotFound:
                    continue
                raise AssertionError("an unknown model was taken")
            assert {model for model, _ in node.measurements.loads} == {"a"}
            assert len(generate_latest(telemetry.REGISTRY).splitlines()) == before

    run_virtual(work())


def test_audit_events_wait_for_the_stream_in_their_order() -> None:
    """A stream that is away for 3 s gets both events then; recording never waits and never fails a load."""

    async def work() -> None:
        bus = FakeBus()
        bus.connected = False
        kept: EventBus = bus
        audit = BusAuditTrail(kept, NodeId("n1"), VirtualClock())
        sending = asyncio.create_task(audit.send())
        for what in ("load", "unload"):
            audit.record(AuditNote(what, version_of(A), "demand", {"x": "y"}))
        await asyncio.sleep(3)
        bus.connected = True
        await audit.flush(2_000)
        sending.cancel()
        events = [events_pb2.AuditEvent.FromString(data) for _, data in bus.durable.values()]
        assert [(event.what, event.subject, event.actor) for event in events] == [
            ("load", "a", "loader/n1"),
            ("unload", "a", "loader/n1"),
        ]
        assert events[0].details == {"node": "n1", "digest": A.digest, "x": "y"}

    run_virtual(work())
