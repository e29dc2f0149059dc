"""Choice of instances under Hypothesis: invariant 3 with instances of any part, speed and cache."""

from hypothesis import given
from hypothesis import strategies as st

from roundhouse.vocabulary import NodeId, Outcome, PriorityClass, TenantId
from services.scheduler.domain.fair_queue import FairQueue
from services.scheduler.domain.records import (
    AttemptId,
    Ending,
    Offer,
    Part,
    Progress,
    QueueEntry,
    Room,
    Tokens,
    instance_key,
    version_key,
)

M = version_key("m", "sha256:1")
NOW = 1_800_000_000_000
NODES = [NodeId(f"n{number}") for number in range(5)]

costs = st.integers(0, 100_000)
offers = st.lists(
    st.tuples(st.sampled_from(list(Part)), st.integers(1, 3), costs, costs, costs), min_size=1, max_size=len(NODES)
)
events = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "token", "end"]), st.integers(0, 5_000), st.integers(0, 4)), max_size=60
)


@given(offers, events)
def test_no_slot_is_idle_while_a_request_could_use_it(
    shapes: list[tuple[Part, int, int, int, int]], story: list[tuple[str, int, int]]
) -> None:
    """After every event and take, a request waits only if every slot that can run one whole is taken; slots in use are
    exactly those of running requests, two for one whose prompt runs elsewhere and has not ended."""
    queue, running, asked = FairQueue(), dict[AttemptId, bool](), 0
    these = [
        Offer(instance_key(node, M), M, slots, node.encode(), part, token_us, load_us, handoff_us)
        for node, (part, slots, token_us, load_us, handoff_us) in zip(NODES, shapes, strict=False)
    ]
    room = sum(each.slots for each in these if each.part is not Part.PREFILL)
    for number, (what, size, node) in enumerate(story):
        now_ms = NOW + number
        if what == "ask":
            warm = ((instance_key(NODES[node], M), size // 2),)
            entry = QueueEntry(
                AttemptId(f"r{number}"),
                TenantId("t"),
                M,
                PriorityClass.STANDARD,
                size,
                9,
                NOW + 10**9,
                1_000,
                b"",
                warm,
            )
            queue.enqueue(entry, Room(10_000, room), now_ms)
            asked += 1
        elif running:
            attempt = sorted(running)[node % len(running)]
            if what == "token":
                queue.renew([Progress(attempt, Tokens(size, 0, 1))], now_ms)
                running[attempt] = False
            else:
                queue.finish(Ending(attempt, Outcome.DONE, Tokens(size, 0, 1), 5), now_ms)
                del running[attempt]
        for ticket in queue.take(these, 100, now_ms).granted:
            running[ticket.attempt] = bool(ticket.prefill_place)
            asked -= 1
        assert len(running) == room or not asked
        assert sum(queue.in_use.values()) == len(running) + sum(running.values())
        assert all(queue.in_use.get(each.instance, 0) <= each.slots for each in these)
