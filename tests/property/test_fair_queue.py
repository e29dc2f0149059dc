"""Fairness of the fair queue under Hypothesis: invariants 2 (bounded gap), 3 (work conserving), 4 and 5."""

from hypothesis import given
from hypothesis import strategies as st

from roundhouse.vocabulary import NodeId, Outcome, PriorityClass, TenantId
from services.scheduler.domain import service
from services.scheduler.domain.fair_queue import FairQueue
from services.scheduler.domain.records import (
    AttemptId,
    Ending,
    Offer,
    Queued,
    QueueEntry,
    Room,
    Standing,
    Tokens,
    instance_key,
    version_key,
)
from services.scheduler.domain.service import Policy

NOW_MS = 1_800_000_000_000
FOREVER_MS = NOW_MS + 10**9
M = version_key("m", "sha256:1")
ROOM = Room(queue_limit=10_000, slots=1)
OUTPUT = 50  # predicted exactly: no request may produce more, and every one does


def offer(slots: int) -> Offer:
    return Offer(instance_key(NodeId("n"), M), M, slots)


def entry(
    name: str,
    tenant: str,
    *,
    size: int = 100,
    weight: float = 1.0,
    priority_class: PriorityClass = PriorityClass.STANDARD,
) -> QueueEntry:
    return QueueEntry(
        AttemptId(name), TenantId(tenant), M, priority_class, size, OUTPUT, FOREVER_MS, round(1000 * weight)
    )


def cost(of: QueueEntry) -> int:
    """Milli-service of one request: (input + 2 × output) × 1000 / weight."""
    return service.charge_milli(of.input_tokens + 2 * OUTPUT, of.weight_milli)


def serve_one(queue: FairQueue, entries: dict[AttemptId, QueueEntry], now_ms: int = NOW_MS) -> QueueEntry | None:
    """Grant one request on the single slot and end it as predicted."""
    taken = queue.take([offer(1)], 1, now_ms)
    if not taken.granted:
        return None
    served = entries[taken.granted[0].attempt]
    used = Tokens(served.input_tokens, 0, OUTPUT)
    queue.finish(Ending(served.attempt, Outcome.DONE, used, 10), now_ms)
    return served


sizes = st.integers(1, 4_000)
weights = st.sampled_from([0.5, 1.0, 2.0, 4.0])


@given(
    st.dictionaries(
        st.sampled_from("abcd"), st.tuples(weights, st.lists(sizes, min_size=3, max_size=15)), min_size=2, max_size=4
    )
)
def test_backlogged_tenants_stay_close(plan: dict[str, tuple[float, list[int]]]) -> None:
    """Invariant 2: while all have work waiting, weighted service differs by at most twice the largest request."""
    queue, entries = FairQueue(), {}
    for tenant, (weight, requests) in plan.items():
        for number, size in enumerate(requests):
            each = entry(f"{tenant}{number}", tenant, size=size, weight=weight)
            entries[each.attempt] = each
            assert isinstance(queue.enqueue(each, ROOM, NOW_MS), Queued)
    largest = max(cost(each) for each in entries.values())
    left = {tenant: len(requests) for tenant, (_, requests) in plan.items()}
    received = dict.fromkeys(plan, 0)
    while all(left.values()):
        served = serve_one(queue, entries)
        assert served is not None
        left[served.tenant_id] -= 1
        received[served.tenant_id] += cost(served)
        assert max(received.values()) - min(received.values()) <= 2 * largest


@given(st.lists(sizes, min_size=20, max_size=60), st.integers(1, 15))
def test_a_returning_tenant_spends_at_most_its_credit(loud: list[int], quiet_requests: int) -> None:
    """Invariant 5: however long it was idle, it gets at most two requests of its average cost ahead of the others."""
    queue, entries = FairQueue(), {}

    def add(each: QueueEntry) -> None:
        entries[each.attempt] = each
        queue.enqueue(each, ROOM, NOW_MS)

    add(entry("q-first", "quiet"))
    serve_one(queue, entries)  # it is known, and has an average
    for number, size in enumerate(loud):
        add(entry(f"l{number}", "loud", size=size))
    for _ in range(len(loud) // 2):
        serve_one(queue, entries)
    for number in range(quiet_requests):
        add(entry(f"q{number}", "quiet"))
    in_a_row = 0
    while (served := serve_one(queue, entries)) is not None and served.tenant_id == "quiet":
        in_a_row += 1
    # Two by credit, and one more when it is level with the other.
    assert in_a_row <= Policy().credit_requests + 1


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.sampled_from("abc"), st.sampled_from(list(PriorityClass))),
            st.tuples(st.just("end"), st.just("a"), st.just(PriorityClass.BATCH)),
            st.tuples(st.just("leave"), st.just("a"), st.just(PriorityClass.BATCH)),
        ),
        max_size=80,
    ),
    st.integers(1, 4),
)
def test_no_slot_is_idle_while_a_request_waits(events: list[tuple[str, str, PriorityClass]], slots: int) -> None:
    """Invariant 3: after every event and take, a free slot means an empty queue."""
    queue = FairQueue()
    running: list[AttemptId] = []
    waiting: list[AttemptId] = []
    for number, (what, tenant, name) in enumerate(events):
        match what:
            case "ask":
                each = entry(f"r{number}", tenant, priority_class=name)
                queue.enqueue(each, ROOM, NOW_MS + number)
                waiting.append(each.attempt)
            case "end" if running:
                queue.finish(Ending(running.pop(0), Outcome.DONE, Tokens(1, 0, 1), 1), NOW_MS + number)
            case "leave" if waiting:
                queue.cancel(waiting.pop(), NOW_MS + number)
        for ticket in queue.take([offer(slots)], 100, NOW_MS + number).granted:
            assert ticket.standing is Standing.GRANTED
            waiting.remove(ticket.attempt)
            running.append(ticket.attempt)
        assert len(running) == slots or not waiting
        assert sum(queue.in_use.values()) == len(running)


def test_each_class_gets_its_guaranteed_share() -> None:
    """Invariant 4: with all three backlogged and equal requests, 100 grants split 50/30/20 (±1 for rounding)."""
    queue, entries = FairQueue(Policy(ageing_per_ms=0)), {}
    for name in PriorityClass:
        for number in range(100):
            each = entry(f"{name}{number}", "t", priority_class=name)
            entries[each.attempt] = each
            queue.enqueue(each, ROOM, NOW_MS)
    served = [serve_one(queue, entries) for _ in range(100)]
    counts = {name: sum(1 for each in served if each and each.priority_class is name) for name in PriorityClass}
    expected = {PriorityClass.INTERACTIVE: 50, PriorityClass.STANDARD: 30, PriorityClass.BATCH: 20}
    assert all(abs(counts[name] - expected[name]) <= 1 for name in PriorityClass)


@given(st.integers(1, 2_000), st.sampled_from([PriorityClass.STANDARD, PriorityClass.BATCH]))
def test_a_flood_of_interactive_requests_starves_nobody(size: int, name: PriorityClass) -> None:
    """Invariant 4: one request of a lower class in an endless interactive flood runs within two grants.

    The flood's pass grows by cost / 0.5 a grant and the other's stands still, so it is passed after one grant more than
    the head start of zero: at most two."""
    queue, entries = FairQueue(), {}
    for number in range(20):
        each = entry(f"i{number}", f"t{number % 3}", size=size, priority_class=PriorityClass.INTERACTIVE)
        entries[each.attempt] = each
        queue.enqueue(each, ROOM, NOW_MS)
    low = entry("low", "z", size=size, priority_class=name)
    entries[low.attempt] = low
    queue.enqueue(low, ROOM, NOW_MS)
    order = [serve_one(queue, entries) for _ in range(2)]
    assert low in order


def test_waiting_raises_priority() -> None:
    """Invariant 4: a batch request that would go third goes first once it has waited long enough.

    Its pass is ahead by one batch grant: 200 units / 0.2 = 1000 units; at 0.1 units a ms that is 10 s."""
    for waited_ms, first in ((9_000, PriorityClass.INTERACTIVE), (11_000, PriorityClass.BATCH)):
        queue = FairQueue()
        entries: dict[AttemptId, QueueEntry] = {}
        for name in ("b0", "b1"):
            each = entries[AttemptId(name)] = entry(name, "t", priority_class=PriorityClass.BATCH)
            queue.enqueue(each, ROOM, NOW_MS)
        serve_one(queue, entries)  # b0: the batch pass is now 1000 units
        fresh = entries[AttemptId("i")] = entry("i", "u", priority_class=PriorityClass.INTERACTIVE)
        queue.enqueue(fresh, ROOM, NOW_MS + waited_ms)
        queue._versions[M].lanes[PriorityClass.INTERACTIVE].pass_milli = 0  # as if it had been there from the start
        served = serve_one(queue, entries, NOW_MS + waited_ms)
        assert served is not None
        assert served.priority_class is first


@given(st.integers(2, 6), st.integers(2, 20))
def test_no_tenant_starves_among_tenants_that_come_and_go(others: int, rounds: int) -> None:
    """Invariant 4: a waiting tenant is passed by each returning one at most its credit and once more."""
    queue, entries = FairQueue(), {}

    def add(each: QueueEntry) -> None:
        entries[each.attempt] = each
        queue.enqueue(each, ROOM, NOW_MS)

    for tenant in range(others):
        add(entry(f"first{tenant}", f"o{tenant}"))
        serve_one(queue, entries)
    add(entry("victim", "v"))
    grants = 0
    for number in range(rounds * others):
        add(entry(f"r{number}", f"o{number % others}"))
        served = serve_one(queue, entries)
        grants += 1
        if served is not None and served.tenant_id == "v":
            break
    assert grants <= others * (Policy().credit_requests + 2)


class Intervals:
    """The largest difference of service between two tenants over any time in which both waited without a break."""

    def __init__(self) -> None:
        self.largest = 0
        self._received: dict[str, int] = {}
        self._ranges: dict[tuple[str, str], tuple[int, int]] = {}

    def note(self, tenant: str, amount: int, waiting: set[str]) -> None:
        """`tenant`, which waited, received service; `waiting` is who waited before the grant."""
        before = dict(self._received)
        self._received[tenant] = before.get(tenant, 0) + amount
        for other in waiting - {tenant}:
            pair = (min(tenant, other), max(tenant, other))
            was, now = (each.get(pair[0], 0) - each.get(pair[1], 0) for each in (before, self._received))
            low, high = self._ranges.get(pair, (was, was))
            self._ranges[pair] = (min(low, now), max(high, now))
            self.largest = max(self.largest, max(high, now) - min(low, now))

    def leave(self, tenant: str) -> None:
        """It waits no longer: what comes later is another interval."""
        self._ranges = {pair: each for pair, each in self._ranges.items() if tenant not in pair}


@given(
    st.integers(0, 4),
    st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.sampled_from("abc"), sizes),
            st.tuples(st.just("serve"), st.just("a"), st.integers(1, 4)),
        ),
        min_size=10,
        max_size=120,
    ),
    st.dictionaries(st.sampled_from("abc"), weights),
)
def test_waiting_tenants_stay_within_the_bound_and_the_credit(
    credit: int, events: list[tuple[str, str, int]], weight: dict[str, float]
) -> None:
    """Invariants 2 and 5: tenants that come and go with unequal costs and weights. While two of them wait, their
    weighted service differs by at most twice the largest request, plus the credit that one of them may have saved."""
    queue, entries = FairQueue(Policy(credit_requests=credit)), {}
    left: dict[str, int] = dict.fromkeys("abc", 0)
    intervals = Intervals()
    for number, (what, tenant, size) in enumerate(events):
        if what == "ask":
            each = entry(f"r{number}", tenant, size=size, weight=weight.get(tenant, 1.0))
            entries[each.attempt] = each
            queue.enqueue(each, ROOM, NOW_MS)
            left[tenant] += 1
            continue
        for _ in range(size):
            waiting = {name for name, count in left.items() if count}
            served = serve_one(queue, entries)
            if served is None:
                break
            intervals.note(served.tenant_id, cost(served), waiting)
            left[served.tenant_id] -= 1
            if not left[served.tenant_id]:
                intervals.leave(served.tenant_id)
    largest = max((cost(each) for each in entries.values()), default=0)
    assert intervals.largest <= (2 + credit) * largest


@given(
    st.lists(sizes, min_size=1, max_size=6),
    st.sampled_from([(500, 300, 200), (900, 90, 10), (998, 1, 1)]),
    st.sampled_from([0, 100]),
    st.sampled_from([PriorityClass.STANDARD, PriorityClass.BATCH]),
)
def test_the_worst_wait_of_a_class_is_bounded(
    flood: list[int], shares: tuple[int, int, int], ageing_per_ms: int, name: PriorityClass
) -> None:
    """Invariant 4: an endless flood of the other two classes holds a request back only as long as the shares say.

    The worst moment is right after its class was served: its pass is then ahead of the least one by its own charge,
    cost / share. Each grant of another class c raises that pass by cost / share(c), so c gets at most
    1 + (our charge) / (its least charge) grants first. Ageing only shortens that: the flood is never older."""
    policy = Policy(*shares, ageing_per_ms=ageing_per_ms, overload_ms=0)
    queue, entries, now_ms = FairQueue(policy), {}, NOW_MS
    numbers = iter(range(100_000))

    def add(priority_class: PriorityClass, size: int) -> QueueEntry:
        each = entry(f"r{next(numbers)}", f"t-{priority_class}", size=size, priority_class=priority_class)
        entries[each.attempt] = each
        assert isinstance(queue.enqueue(each, ROOM, now_ms), Queued)
        return each

    def charge(size: int, priority_class: PriorityClass) -> int:
        return service.charge_milli(size + 2 * OUTPUT, policy.share_milli(priority_class))

    others = [each for each in PriorityClass if each is not name]
    before, wanted = add(name, 100), add(name, 100)
    for each in others:
        add(each, flood[0])
    bound = sum(1 + charge(100, name) // charge(min(flood), each) for each in others)
    grants, begun = 0, False
    for turn in range(3 + bound):
        served = serve_one(queue, entries, now_ms)
        assert served is not None
        if served == wanted:
            assert grants <= bound
            return
        begun, grants = (True, 0) if served == before else (begun, grants + begun)
        now_ms += 10
        if served.priority_class is not name:
            add(served.priority_class, flood[turn % len(flood)])
    raise AssertionError("it starved")
