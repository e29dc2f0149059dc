"""The fair queue by example, with the arithmetic shown."""

from dataclasses import replace

import pytest

from roundhouse.errors import Unavailable
from roundhouse.vocabulary import NodeId, Outcome, PriorityClass, TenantId
from services.scheduler.domain import service
from services.scheduler.domain.fair_queue import FairQueue
from services.scheduler.domain.records import (
    AttemptId,
    Cancelled,
    Ending,
    Known,
    NotHeld,
    Offer,
    Progress,
    Queued,
    QueueEntry,
    QueueFull,
    QueueLimit,
    RefusalReason,
    Room,
    Settled,
    Shed,
    Standing,
    Tokens,
    TooLate,
    instance_key,
    version_key,
)
from services.scheduler.domain.service import Policy

T0 = 1_800_000_000_000
M = version_key("m", "sha256:1")
N1, N2 = (instance_key(NodeId(name), M) for name in ("n1", "n2"))
ROOM = Room(queue_limit=3, slots=1)


def entry(name: str, tenant: str = "a", deadline_ms: int = 60_000) -> QueueEntry:
    return QueueEntry(
        AttemptId(name), TenantId(tenant), M, PriorityClass.STANDARD, 100, 50, T0 + deadline_ms, payload=b"p"
    )


def test_service_is_uncached_input_once_and_output_twice_over_weight() -> None:
    """(1000 - 400) × 1 + 2 × 200 = 1000 units; at weight 2 that is 500, kept as 500,000 thousandths."""
    units = service.cost_units(1_000, 400, 200)
    assert units == 1_000
    assert service.charge_milli(units, 2_000) == 500_000


def test_predicted_output_follows_the_tenant_and_never_exceeds_the_request() -> None:
    """No history: 256, or less if the request allows less. A new tenant of a known model: the model's average. An
    average of 80 after a first answer of 80; then 80 + (160 - 80) / 8 = 90."""
    assert service.predicted_output(0, 0, 4_000) == 256
    assert service.predicted_output(0, 0, 16) == 16
    assert service.predicted_output(0, 70_000, 4_000) == 70
    average = service.moved_average(0, 80)
    assert service.predicted_output(average, 70_000, 4_000) == 80
    assert service.predicted_output(service.moved_average(average, 160), 70_000, 4_000) == 90


def test_a_dispatch_charges_the_prediction_and_the_end_corrects_it() -> None:
    """Charged 100 + 2 × 50 = 200 units; ended with 60 cached and 10 output: 40 + 20 = 60 units."""
    queue = FairQueue()
    queue.enqueue(entry("r"), ROOM, T0)
    queue.take([Offer(N1, M, 1)], 1, T0)
    assert queue.service_milli(M, entry("r")) == 200_000
    ending = Ending(AttemptId("r"), Outcome.DONE, Tokens(100, 60, 10), 500)
    assert queue.finish(ending, T0 + 500) == Settled(M)
    assert queue.service_milli(M, entry("r")) == 60_000
    assert queue.finish(ending, T0 + 600) == NotHeld()
    assert queue.service_milli(M, entry("r")) == 60_000


def test_progress_beyond_the_prediction_is_charged_at_once() -> None:
    """Charged 200 units; a heartbeat says 100 input and 80 output: 260."""
    queue = FairQueue()
    queue.enqueue(entry("r"), ROOM, T0)
    queue.take([Offer(N1, M, 1)], 1, T0)
    assert queue.renew([Progress(AttemptId("r"), Tokens(100, 0, 80))], T0 + 1_000) == ()
    assert queue.service_milli(M, entry("r")) == 260_000


def test_a_refund_from_before_a_lift_is_dropped() -> None:
    """Invariant 5: a was charged 200; idle while b reached 2,000; back, it is lifted to 1,800 - credit; its late refund
    of 200 would be more than its credit, so it is lost."""
    queue = FairQueue()
    wide = Room(queue_limit=100, slots=100)
    queue.enqueue(entry("a1"), wide, T0)
    queue.take([Offer(N1, M, 100)], 1, T0)
    for number in range(11):
        queue.enqueue(entry(f"b{number}", "b"), wide, T0)
    queue.take([Offer(N1, M, 100)], 10, T0)
    queue.enqueue(entry("a2"), wide, T0)
    # b waits at 10 × 200; no history yet, so the credit is 2 × (100 + 2 × 50).
    assert queue.service_milli(M, entry("a2")) == 2_000_000 - 400_000
    queue.finish(Ending(AttemptId("a1"), Outcome.FAILED), T0)
    assert queue.service_milli(M, entry("a2")) == 1_600_000


def test_the_earliest_deadline_of_a_tenant_goes_first_then_the_order_of_arrival() -> None:
    """Deadlines 50, 20, 50 s: the second, then the first, then the third."""
    queue = FairQueue()
    for name, deadline_ms in (("r1", 50_000), ("r2", 20_000), ("r3", 50_000)):
        queue.enqueue(entry(name, deadline_ms=deadline_ms), ROOM, T0)
    taken = queue.take([Offer(N1, M, 3)], 3, T0)
    assert [ticket.attempt for ticket in taken.granted] == ["r2", "r1", "r3"]


def test_grants_go_to_the_least_loaded_instance() -> None:
    """Slots 2 and 4: loads 0/2, 0/4 → n1; 1/2, 0/4 → n2; 1/2, 1/4 → n2; 1/2, 2/4 → n1."""
    queue = FairQueue()
    for number in range(4):
        queue.enqueue(entry(f"r{number}"), replace(ROOM, queue_limit=9), T0)
    taken = queue.take([Offer(N1, M, 2, b"1"), Offer(N2, M, 4, b"2")], 4, T0)
    assert [ticket.place for ticket in taken.granted] == [b"1", b"2", b"2", b"1"]


def test_a_key_or_a_model_has_a_queue_of_its_own() -> None:
    """One place for the key: full, although the tenant has three; another key still fits; granted, there is room."""
    queue, mine, other = FairQueue(), (QueueLimit("k:1", 1, 0),), (QueueLimit("k:2", -1, 2_000),)
    assert queue.enqueue(replace(entry("r1"), queues=mine), ROOM, T0) == Queued(0, 0)
    assert queue.enqueue(replace(entry("r2"), queues=mine), ROOM, T0) == QueueFull(1_000, "k:1")
    assert isinstance(queue.enqueue(replace(entry("r3"), queues=other), ROOM, T0), Queued)
    queue.take([Offer(N1, M, 1)], 1, T0)
    assert isinstance(queue.enqueue(replace(entry("r4"), queues=mine), ROOM, T0), Queued)


def test_a_full_queue_says_when_it_has_room_again() -> None:
    """Three queued of three: full. After grants at 0, 400 and 800 ms the tenant drains every 400 ms."""
    queue = FairQueue()
    for number in range(3):
        assert queue.enqueue(entry(f"r{number}"), ROOM, T0) == Queued(number, 0)
    assert queue.enqueue(entry("x"), ROOM, T0) == QueueFull(1_000)
    for turn in range(3):
        queue.take([Offer(N1, M, 9)], 1, T0 + 400 * turn)
        queue.enqueue(entry(f"s{turn}"), ROOM, T0 + 400 * turn)
    assert queue.enqueue(entry("x"), ROOM, T0 + 800) == QueueFull(400)


def test_what_cannot_start_in_time_is_refused() -> None:
    """A run takes 1,000 ms on one busy slot, two are ahead of it: (2 + 1) × 1,000 = 3,000 ms > 2,500 ms."""
    queue = FairQueue()
    queue.enqueue(entry("first"), ROOM, T0)
    queue.take([Offer(N1, M, 1)], 1, T0)
    queue.finish(Ending(AttemptId("first"), Outcome.DONE, Tokens(100, 0, 50), 1_000), T0)
    for number in range(3):
        queue.enqueue(entry(f"r{number}"), Room(9, 1), T0)
    queue.take([Offer(N1, M, 1)], 1, T0)
    assert queue.enqueue(entry("late", deadline_ms=60_001), Room(9, 1), T0) == Queued(2, 3_000)
    assert queue.enqueue(entry("x", "b", deadline_ms=900), Room(9, 1), T0) == TooLate(1_000)
    assert queue.enqueue(entry("cold", "c", deadline_ms=900), Room(9, 0, start_after_ms=5_000), T0) == TooLate(5_000)


@pytest.mark.parametrize("again", [entry("r"), entry("r", "b", 1)])
def test_a_repeated_submit_changes_nothing(again: QueueEntry) -> None:
    """Invariant 1: the bus may repeat a submit; the second is only told where the first stands."""
    queue = FairQueue()
    queue.enqueue(entry("r"), ROOM, T0)
    assert queue.enqueue(again, ROOM, T0) == Known(Standing.QUEUED)
    assert queue.waiting(M) == 1


def test_a_cancel_that_overtakes_its_submit_wins() -> None:
    """The client left before its submit was processed: the late submit is told that it ended."""
    queue = FairQueue()
    assert queue.cancel(AttemptId("r"), T0) == Cancelled.UNKNOWN
    assert queue.enqueue(entry("r"), ROOM, T0) == Known(Standing.ENDED)


def test_a_refusal_is_kept_until_it_arrives() -> None:
    """Refused at its deadline, due again every half second, gone once acknowledged."""
    queue = FairQueue()
    queue.enqueue(entry("r", deadline_ms=1_000), ROOM, T0)
    (refused,) = queue.expire(T0 + 1_000).refused
    assert (refused.standing, refused.reason) == (Standing.REFUSED, RefusalReason.DEADLINE)
    assert queue.claim_due(T0 + 1_400) == ()
    assert [ticket.attempt for ticket in queue.claim_due(T0 + 1_500)] == ["r"]
    queue.acknowledge([AttemptId("r")], T0 + 1_600)
    assert queue.claim_due(T0 + 9_000) == ()


def test_a_lapsed_lease_frees_the_slot_and_owes_a_usage_event() -> None:
    """Invariants 1 and 13: lease 10 s from the grant; the last heartbeat's tokens are what is settled."""
    queue = FairQueue()
    queue.enqueue(entry("r"), ROOM, T0)
    queue.take([Offer(N1, M, 1)], 1, T0)
    queue.renew([Progress(AttemptId("r"), Tokens(100, 0, 7))], T0 + 1_000)
    assert queue.expire(T0 + 10_999).lapsed == ()
    (lapsed,) = queue.expire(T0 + 11_000).lapsed
    assert (lapsed.used, queue.in_use[N1]) == (Tokens(100, 0, 7), 0)
    assert queue.service_milli(M, entry("r")) == 114_000
    assert [ticket.standing for ticket in queue.claim_due(T0 + 12_000)] == [Standing.LAPSED]
    assert queue.finish(Ending(AttemptId("r"), Outcome.DONE, Tokens(1, 0, 1)), T0 + 12_000) == NotHeld()


def test_ended_attempts_are_forgotten_in_the_end() -> None:
    """A tombstone answers repeats for two minutes."""
    queue = FairQueue(Policy(tombstone_ms=120_000))
    queue.cancel(AttemptId("r"), T0)
    assert isinstance(queue.enqueue(entry("r", deadline_ms=300_000), ROOM, T0 + 119_999), Known)
    assert isinstance(queue.enqueue(entry("r", deadline_ms=300_000), ROOM, T0 + 120_000), Queued)


def batch(name: str) -> QueueEntry:
    return replace(entry(name, "night"), priority_class=PriorityClass.BATCH)


def overloaded() -> FairQueue:
    """A run takes 1,000 ms on one slot; four standard requests wait: 4,000 ms, 1,000 more than the 3,000 allowed."""
    queue = FairQueue(Policy(overload_ms=3_000, batch_pause_ms=10_000, ageing_per_ms=0))
    queue.enqueue(batch("b"), Room(9, 1), T0)
    queue.enqueue(entry("first"), Room(9, 1), T0)
    queue.take([Offer(N1, M, 1)], 1, T0)
    queue.finish(Ending(AttemptId("first"), Outcome.DONE, Tokens(100, 0, 50), 1_000), T0)
    for number in range(4):
        queue.enqueue(entry(f"s{number}"), Room(9, 1), T0)
    return queue


def test_batch_is_shed_under_overload() -> None:
    """New batch work is told when the backlog is short enough again; others, and two slots, are not overloaded."""
    queue = overloaded()
    assert queue.enqueue(batch("b2"), Room(9, 1), T0) == Shed(1_000)
    assert queue.enqueue(batch("b2"), Room(9, 2), T0) == Queued(1, 500)
    assert queue.enqueue(entry("s9"), Room(9, 1), T0) == Queued(4, 4_000)


def test_batch_pauses_under_overload_but_not_for_ever() -> None:
    """The batch request has a pass of 0 against that of the standard ones, so without the pause it would go first. It
    does not while 4,000 ms of others wait; it goes as soon as only 3,000 ms do, or when it has waited for 10 s."""
    queue = overloaded()
    taken = queue.take([Offer(N1, M, 1)], 1, T0).granted
    assert [ticket.attempt for ticket in taken] == ["s0"]
    queue.finish(Ending(AttemptId("s0"), Outcome.DONE, Tokens(100, 0, 50), 1_000), T0 + 1_000)
    taken = queue.take([Offer(N1, M, 1)], 1, T0 + 1_000).granted
    assert [ticket.attempt for ticket in taken] == ["b"]
    queue = overloaded()
    taken = queue.take([Offer(N1, M, 1)], 1, T0 + 9_999).granted
    assert [ticket.attempt for ticket in taken] == ["s0"]
    queue = overloaded()
    assert [ticket.attempt for ticket in queue.take([Offer(N1, M, 1)], 1, T0 + 10_000).granted] == ["b"]


def test_tokens_in_the_queue_are_limited_too() -> None:
    """150 tokens each; the limit is 400. Two fit; a third needs 50 tokens more than there is room for: one request of
    the average size of 150 must go first, which takes as long as this queue needs for one."""
    queue, room = FairQueue(), Room(queue_limit=9, slots=1, token_limit=400)
    for number in range(2):
        assert isinstance(queue.enqueue(entry(f"r{number}"), room, T0), Queued)
    assert queue.enqueue(entry("r2"), room, T0) == QueueFull(1_000)
    assert isinstance(queue.enqueue(entry("other", "b"), room, T0), Queued)
    large = replace(entry("large"), input_tokens=950)  # 1,000 tokens: 900 too many are 6 requests, of which 2 wait
    assert queue.enqueue(large, room, T0) == QueueFull(2_000)


def test_a_request_above_the_token_limit_waits_alone() -> None:
    """Otherwise it could never run at all."""
    queue, room = FairQueue(), Room(queue_limit=9, slots=1, token_limit=400)
    assert isinstance(queue.enqueue(replace(entry("large"), input_tokens=950), room, T0), Queued)
    assert isinstance(queue.enqueue(entry("r"), room, T0), QueueFull)


def test_device_time_charges_what_a_slot_was_held() -> None:
    """No history: 1,000 ms are charged; 300 ms were used; the next is charged 300, and 700 once it has run so long."""
    queue = FairQueue(Policy(device_time=True))
    queue.enqueue(entry("r"), ROOM, T0)
    queue.take([Offer(N1, M, 1)], 1, T0)
    assert queue.service_milli(M, entry("r")) == 1_000_000
    queue.finish(Ending(AttemptId("r"), Outcome.DONE, Tokens(100, 0, 50), 300), T0 + 300)
    assert queue.service_milli(M, entry("r")) == 300_000
    queue.enqueue(entry("r2"), ROOM, T0 + 300)
    queue.take([Offer(N1, M, 1)], 1, T0 + 300)
    queue.renew([Progress(AttemptId("r2"), Tokens(100, 0, 80))], T0 + 1_000)
    assert queue.service_milli(M, entry("r")) == 300_000 + 700_000


def test_of_equal_tenants_who_was_served_longest_ago_goes_first() -> None:
    """Same costs, credit off: a, b, a by turns; a name breaks no tie twice."""
    queue = FairQueue(Policy(credit_requests=0))
    for name, tenant in (("b1", "b"), ("a1", "a"), ("a2", "a"), ("b2", "b"), ("a3", "a")):
        queue.enqueue(entry(name, tenant), replace(ROOM, queue_limit=9), T0)
    taken = queue.take([Offer(N1, M, 9)], 9, T0)
    assert [ticket.attempt for ticket in taken.granted] == ["a1", "b1", "a2", "b2", "a3"]


def test_a_caller_that_slept_hands_nothing_out() -> None:
    """Lease 10 s: what is 2.5 s behind what others have said is late; 2.5 s exactly is not."""
    queue = FairQueue()
    queue.enqueue(entry("r"), ROOM, T0)
    queue.take([], 1, T0 + 10_000)
    with pytest.raises(Unavailable):
        queue.take([Offer(N1, M, 1)], 1, T0 + 7_499)
    assert len(queue.take([Offer(N1, M, 1)], 1, T0 + 7_500).granted) == 1


def test_a_tenant_with_many_keys_and_models_names_is_one_tenant() -> None:
    """`a` asks with five keys, `b` with one: by turns, five of ten each; not five sixths for whoever has more keys."""
    queue = FairQueue(Policy(credit_requests=0))
    for number in range(10):
        key = QueueLimit(f"k:{number % 5}", -1, 0)
        queue.enqueue(replace(entry(f"a{number}", "a"), queues=(key,)), replace(ROOM, queue_limit=99), T0)
        queue.enqueue(entry(f"b{number}", "b"), replace(ROOM, queue_limit=99), T0)
    taken = queue.take([Offer(N1, M, 10)], 10, T0).granted
    assert [ticket.attempt[0] for ticket in taken].count("a") == 5
