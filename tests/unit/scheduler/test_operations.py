"""Small pieces of the scheduler's operations: node states, where a wait went, refusals."""

from dataclasses import replace

from roundhouse.vocabulary import NodeId, PoolName, PriorityClass
from roundhouse.wire.v1 import loading_pb2, scheduling_pb2, vocabulary_pb2
from services.scheduler.domain.nodes import InstanceView, Residence
from services.scheduler.domain.placement import PoolView
from services.scheduler.domain.records import AttemptId, Standing, Ticket, Tokens, version_key
from services.scheduler.domain.viability import is_served
from services.scheduler.operations import deliveries, places
from services.scheduler.operations.nodes import NodeRegistry
from services.scheduler.operations.pools import EMPTY_STATE
from tests.fakes.clock import ManualClock

M = version_key("m", "sha256:1")
POOL = PoolName("shared")


def state(sequence: int, *, incarnation: str = "a", accepting: bool = True, sent_ms: int = 0) -> loading_pb2.NodeState:
    return loading_pb2.NodeState(
        node_id="n1",
        sequence=sequence,
        incarnation=incarnation,
        sent_unix_ms=sent_ms,
        pool=POOL,
        accepting=accepting,
        tiers=[vocabulary_pb2.TierBytes(tier=vocabulary_pb2.TIER_DEVICE, capacity=100, resident=30, reserved=20)],
    )


def test_the_newest_state_of_a_node_counts() -> None:
    """An older sequence is ignored, a new process counts from one again, a late word of the old process is ignored."""
    registry = NodeRegistry(ManualClock())
    registry.observe(state(5, sent_ms=50))
    registry.observe(state(4, accepting=False, sent_ms=40))
    assert registry.nodes(POOL)[0].healthy
    assert registry.nodes(POOL)[0].device_free == 50
    registry.observe(state(1, incarnation="b", accepting=False, sent_ms=60))
    registry.observe(state(6, sent_ms=55))
    assert not registry.nodes(POOL)[0].healthy


def test_a_silent_node_is_out_within_two_seconds_and_forgotten_later() -> None:
    """Heard at 0: healthy at 1,799 ms, not at 1,800 ms; quiet (it may be back) until 10 s; gone after a minute."""
    clock = ManualClock()
    registry = NodeRegistry(clock)
    registry.observe(state(1))
    health = []
    for step_ms in (1_799, 1):
        clock.advance(step_ms)
        health.append(registry.any_healthy)
    assert health == [True, False]
    assert registry.nodes(POOL)[0].quiet
    clock.advance(8_200)
    assert not registry.nodes(POOL)[0].quiet
    clock.advance(60_000)
    assert registry.nodes(POOL) == ()


def test_a_node_that_is_drained_is_there_while_it_speaks() -> None:
    """It takes no work, so none is healthy; a scheduler that hears it is well, until it is silent for 1,800 ms."""
    clock = ManualClock()
    registry = NodeRegistry(clock)
    assert not registry.any_present
    drained = state(1)
    drained.accepting = False
    registry.observe(drained)
    assert (registry.any_present, registry.any_healthy) == (True, False)
    clock.advance(1_800)
    assert not registry.any_present


def test_a_node_that_a_gateway_lost_is_left_out_for_two_seconds() -> None:
    """Its loader's words do not help meanwhile: it may not have seen it yet. Of an unknown node nothing is kept."""
    clock = ManualClock()
    registry = NodeRegistry(clock)
    registry.observe(state(1))
    registry.lost(NodeId("n1"))
    registry.lost(NodeId("n2"))
    health = [registry.any_healthy]
    for sequence in (2, 3, 4, 5):
        clock.advance(500)
        registry.observe(state(sequence))
        health.append(registry.any_healthy)
    assert health == [False, False, False, False, True]


def test_only_real_changes_wake_the_listeners() -> None:
    """The same words a second later wake nobody."""
    heard: list[PoolName] = []
    registry = NodeRegistry(ManualClock())
    registry.listen(heard.append)
    for sequence in (1, 2, 3):
        registry.observe(state(sequence))
    registry.observe(state(4, accepting=False))
    assert heard == [POOL, POOL]


def ticket(enqueued_ms: int, granted_ms: int, *, ready_ms: int, stage_ms: int, load_ms: int) -> Ticket:
    instance = InstanceView(M, Residence.READY, 1, 1, ready_ms, stage_ms, load_ms)
    place = places.encode(scheduling_pb2.Placement(node_id=NodeId("n1")), instance)
    request = scheduling_pb2.SubmitRequest(request_id="r", attempt=1, tenant_id="t", gateway_id="g", model="m")
    return Ticket(
        AttemptId("r/1"),
        Standing.LAPSED,
        request.SerializeToString(),
        enqueued_ms,
        M,
        PriorityClass.STANDARD,
        place,
        granted_ms,
        lease_expires_ms=granted_ms + 5_000,  # of a lapsed one: when it was last renewed
        ended_ms=granted_ms + 15_000,
        used=Tokens(9, 3, 4),
    )


def test_a_wait_is_split_into_queue_stage_and_load() -> None:
    """Queued at 1,000 and granted at 9,000 on an instance that was ready at 8,500 after 4 s of staging and 3 s of load:
    8,000 = 1,000 + 4,000 + 3,000. It joined late: 2,000 = 0 + 0 + 2,000. It came after: all is queueing."""
    times = {"ready_ms": 8_500, "stage_ms": 4_000, "load_ms": 3_000}
    assert places.waits(ticket(1_000, 9_000, **times)) == places.Waits(1_000, 4_000, 3_000)
    assert places.waits(ticket(7_000, 9_000, **times)) == places.Waits(0, 0, 2_000)
    assert places.waits(ticket(8_600, 9_000, **times)) == places.Waits(400, 0, 0)


def test_an_abandoned_attempt_is_billed_as_of_its_last_heartbeat() -> None:
    """Invariant 14: the id is that of the gateway's own event. The last heartbeat was 5 s after the grant: it ran for
    5,000 ms. Two replicas make the same bytes; an attempt without a token costs nothing."""
    event = deliveries.usage_event(ticket(0, 1_000, ready_ms=0, stage_ms=0, load_ms=0), "c1")
    assert (event.id, event.source, event.subject, event.time_unix_ms) == ("r/1", "c1", "t", 16_000)
    assert (event.data.input_tokens, event.data.cached_tokens, event.data.output_tokens) == (9, 3, 4)
    assert event.data.run_ms == 5_000
    assert event.data.emitter == "scheduler"
    assert event.data.outcome == vocabulary_pb2.OUTCOME_ABANDONED
    again = deliveries.usage_event(ticket(0, 1_000, ready_ms=0, stage_ms=0, load_ms=0), "c1")
    assert again.SerializeToString() == event.SerializeToString()
    silent = replace(ticket(0, 1_000, ready_ms=0, stage_ms=0, load_ms=0), used=Tokens(9, 3, 0))
    assert deliveries.usage_event(silent, "c1").data.input_tokens == 0


def test_what_is_ready_with_a_reason_is_about_to_leave() -> None:
    """Case B19: it gets nothing new and is nobody's victim; while its version was not told to leave, it is served."""
    registry = NodeRegistry(ManualClock())
    for sequence, reason, residence in (
        (1, "", Residence.READY),
        (2, "leaves for its new version", Residence.DRAINING),
    ):
        told = state(sequence)
        told.instances.add(
            version=vocabulary_pb2.ModelVersion(model="m", digest="sha256:1"),
            state=vocabulary_pb2.INSTANCE_STATE_READY,
            slots=4,
            reason=reason,
        )
        registry.observe(told)
        nodes = registry.nodes(POOL)
        assert [each.residence for each in nodes[0].instances] == [residence]
        assert is_served(PoolView(nodes, EMPTY_STATE, {}), M) is (residence is Residence.READY)


def test_what_waits_for_a_replaced_version_is_told_to_ask_again() -> None:
    """The reason is the one that gateways follow to the version that took over."""
    given_back = replace(ticket(0, 0, ready_ms=0, stage_ms=0, load_ms=0), standing=Standing.REFUSED, reason="replaced")
    refused = deliveries.delivery(given_back).rejection.refused
    assert refused.reason == scheduling_pb2.Refused.REASON_MODEL_UNKNOWN
