"""Which instance a request is granted on: by the time to its first token, in microseconds that the tests add up."""

from roundhouse.vocabulary import NodeId, Outcome, PriorityClass, TenantId
from services.scheduler.domain.fair_queue import FairQueue
from services.scheduler.domain.records import (
    AttemptId,
    Ending,
    InstanceKey,
    Offer,
    Part,
    Progress,
    QueueEntry,
    Room,
    Ticket,
    Tokens,
    instance_key,
    version_key,
)

M = version_key("m", "sha256:1")
NOW = 1_000_000


def at(name: str) -> InstanceKey:
    return instance_key(NodeId(name), M)


def offer(name: str, part: Part = Part.WHOLE, *, token_us: int = 100, load_us: int = 0, handoff_us: int = 0) -> Offer:
    return Offer(at(name), M, 2, name.encode(), part, token_us, load_us, handoff_us)


class Queue:
    """A queue that numbers its requests."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.count = 0

    def grant(self, *offers: Offer, tokens: int = 1_000, warm: tuple[tuple[InstanceKey, int], ...] = ()) -> Ticket:
        """Queue one request and grant it."""
        self.count += 1
        attempt = AttemptId(f"r{self.count}/1")
        entry = QueueEntry(
            attempt, TenantId("t"), M, PriorityClass.STANDARD, tokens, 10, NOW + 60_000, 1_000, b"", warm
        )
        self.queue.enqueue(entry, Room(100, 2), NOW)
        (ticket,) = self.queue.take(offers, 1, NOW).granted
        return ticket


def test_a_cached_prefix_draws_a_request() -> None:
    """1,000 tokens at 100 us: 100,000 us on n1; on n2, where 600 are cached, 40,000."""
    ticket = Queue().grant(offer("n1"), offer("n2"), warm=((at("n2"), 600),))
    assert ticket.place == b"n2"


def test_a_busy_instance_with_the_prefix_loses_to_a_faster_idle_one() -> None:
    """n2 has 600 cached but one of two slots in use: 40,000 + 1/2 x 200,000 = 140,000 against 100,000."""
    queue = Queue()
    offers = (offer("n1", load_us=200_000), offer("n2", load_us=200_000))
    queue.grant(offers[1])
    assert queue.grant(*offers, warm=((at("n2"), 600),)).place == b"n1"


def test_a_faster_instance_is_preferred_and_a_full_one_is_not_waited_for() -> None:
    """n1 prefills in half the time, so it fills first; then n2 is used although it is slower (invariant 3)."""
    queue = Queue()
    offers = (offer("n1", token_us=50), offer("n2"))
    assert [queue.grant(*offers).place for _ in range(4)] == [b"n1", b"n1", b"n2", b"n2"]


def test_a_long_prompt_is_handed_over_and_a_short_one_stays() -> None:
    """Handing over costs 20,000 us and a token 10 instead of 100: 10 x 1,000 + 20,000 = 30,000 against 100,000; with
    100 tokens 21,000 against 10,000."""
    pair = (offer("p", Part.PREFILL, token_us=10, handoff_us=20_000), offer("d", Part.DECODE))
    queue = Queue()
    long, short = queue.grant(*pair), queue.grant(*pair, tokens=100)
    assert (long.place, long.prefill_place) == (b"d", b"p")
    assert (short.place, short.prefill_place) == (b"d", b"")
    assert queue.queue.in_use == {at("p"): 1, at("d"): 2}


def test_a_prompt_is_handed_over_when_it_would_be_in_the_way() -> None:
    """Nodes of one speed: alone 1,000 tokens stay (100,000 us against 130,000); with one request decoding there, which
    would wait 100,000 us more, they go (130,000 against 200,000). 100 tokens stay even then (20,000 against 40,000)."""
    pair = (offer("p", Part.PREFILL, token_us=100, handoff_us=30_000), offer("d", Part.DECODE))
    queue = Queue()
    alone, beside = queue.grant(*pair), queue.grant(*pair)
    assert (alone.prefill_place, beside.prefill_place) == (b"", b"p")
    queue = Queue()
    queue.grant(*pair)
    assert queue.grant(*pair, tokens=100).prefill_place == b""


def test_a_full_or_missing_prefill_instance_blocks_no_decode_slot() -> None:
    """Invariant 3 with roles: what cannot be handed over runs whole; a prefill slot alone serves nobody."""
    p, d = offer("p", Part.PREFILL, token_us=1), offer("d", Part.DECODE)
    queue = Queue()
    assert queue.grant(d).prefill_place == b""
    entry = QueueEntry(AttemptId("x/1"), TenantId("t"), M, PriorityClass.STANDARD, 9, 9, NOW + 60_000)
    queue.queue.enqueue(entry, Room(100, 0), NOW)
    assert queue.queue.take([p], 1, NOW).granted == ()


def test_both_slots_are_given_back_and_the_prompts_slot_first() -> None:
    """The prompt's slot ends with the first output token; the other with the request; a lapsed lease ends both."""
    pair = (offer("p", Part.PREFILL, token_us=1), offer("d", Part.DECODE))
    queue = Queue()
    first, second = queue.grant(*pair), queue.grant(*pair)
    queue.queue.renew([Progress(first.attempt, Tokens(1_000, 0, 0))], NOW)
    assert queue.queue.in_use == {at("p"): 2, at("d"): 2}
    queue.queue.renew([Progress(first.attempt, Tokens(1_000, 0, 1))], NOW)
    assert queue.queue.in_use == {at("p"): 1, at("d"): 2}
    queue.queue.finish(Ending(first.attempt, Outcome.DONE, Tokens(1_000, 0, 5), 10), NOW)
    assert queue.queue.in_use == {at("p"): 1, at("d"): 1}
    (lapsed,) = queue.queue.expire(NOW + 60_000).lapsed
    assert lapsed.attempt == second.attempt
    assert set(queue.queue.in_use.values()) == {0}
