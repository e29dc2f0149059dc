"""How fast an instance is taken to be."""

import pytest

from roundhouse.vocabulary import NodeId, PriorityClass, TenantId
from services.scheduler.domain.records import AttemptId, Offer, Part, QueueEntry, instance_key, version_key
from services.scheduler.domain.seats import choose_seats
from services.scheduler.domain.speeds import HALF_LIFE_MS, PRIOR_HANDOFF_US, PRIOR_TOKEN_US, FirstToken, Speed, Speeds

M = version_key("m", "sha256:1")
N1, N2 = (instance_key(NodeId(name), M) for name in ("n1", "n2"))
NOW = 1_000_000


def test_nothing_known_is_the_prior_and_a_sibling_is_taken_as_alike() -> None:
    """1,000 tokens in 50 ms are 50 us each; an instance of the same version elsewhere is expected to be as fast."""
    speeds = Speeds()
    assert speeds.of(N1, M, NOW) == Speed(PRIOR_TOKEN_US, 0.0)
    speeds.learn(FirstToken(N1, M, 1_000, 50), NOW)
    assert speeds.of(N1, M, NOW) == speeds.of(N2, M, NOW) == Speed(50.0, 50_000.0)


def test_the_average_moves_by_a_fifth() -> None:
    """50 then 100 us: 0.8 x 50 + 0.2 x 100 = 60."""
    speeds = Speeds()
    speeds.learn(FirstToken(N1, M, 1_000, 50), NOW)
    speeds.learn(FirstToken(N1, M, 1_000, 100), NOW)
    assert speeds.of(N1, M, NOW).token_us == 60.0


def test_short_prompts_and_failures_say_nothing_of_the_prefill() -> None:
    """Five uncached tokens in 20 ms are mostly the round trip; no first token is no measurement."""
    speeds = Speeds()
    speeds.learn(FirstToken(N1, M, 1_000, 50), NOW)
    speeds.learn(FirstToken(N1, M, 5, 20), NOW)
    assert speeds.of(N1, M, NOW) == Speed(50.0, 0.8 * 50_000 + 0.2 * 20_000)
    speeds.learn(FirstToken(N1, M, 1_000, 0), NOW)
    assert speeds.of(N1, M, NOW).token_us == 50.0


def test_one_slow_request_counts_four_times_the_average_at_most() -> None:
    """100 us, then one of 10,000 us: 0.8 x 100 + 0.2 x 400 = 160. What stays slow is believed all the same: each one
    adds 60 %, and 100 x 1.6 ^ 7 > 2,600, a quarter of it, from where on it is averaged as it is."""
    speeds = Speeds()
    speeds.learn(FirstToken(N1, M, 1_000, 100), NOW)
    speeds.learn(FirstToken(N1, M, 1_000, 10_000), NOW)
    assert speeds.of(N1, M, NOW) == Speed(160.0, 160_000.0)
    for _ in range(20):
        speeds.learn(FirstToken(N1, M, 1_000, 10_000), NOW)
    assert speeds.of(N1, M, NOW).token_us == pytest.approx(10_000, rel=0.1)


def test_what_is_not_measured_any_more_is_forgotten() -> None:
    """n1 was slow, 160 us against 100 everywhere else; half of that is left after a half-life: 130."""
    speeds = Speeds()
    speeds.learn(FirstToken(N1, M, 1_000, 160), NOW)
    for _ in range(100):
        speeds.learn(FirstToken(N2, M, 1_000, 100), NOW)
    assert speeds.of(N1, M, NOW).token_us == 160.0
    assert speeds.of(N1, M, NOW + HALF_LIFE_MS).token_us == pytest.approx(130, abs=0.1)
    assert speeds.of(N1, M, NOW + 20 * HALF_LIFE_MS).token_us == pytest.approx(100, abs=0.1)
    assert speeds.of(N1, M, NOW - HALF_LIFE_MS).token_us == 160.0, "a clock that was set back forgets nothing"


def test_a_hand_over_is_averaged_with_what_was_expected_and_forgotten_in_time() -> None:
    """Before one was seen: the prior, 10 ms. 5 ms: 0.8 x 10 + 0.2 x 5 = 9. One of 1,000 s counts as 36 ms:
    0.8 x 9 + 0.2 x 36 = 14.4. A request that had none changes nothing. After a half-life, (14.4 + 10) / 2."""
    speeds = Speeds()
    assert speeds.handoff_us(M, NOW) == PRIOR_HANDOFF_US == 10_000
    speeds.learn_handoff(M, 5, NOW)
    assert speeds.handoff_us(M, NOW) == 9_000.0
    speeds.learn_handoff(M, 1_000_000, NOW)
    speeds.learn_handoff(M, 0, NOW + HALF_LIFE_MS)
    assert speeds.handoff_us(M, NOW) == pytest.approx(14_400)
    assert speeds.handoff_us(M, NOW + HALF_LIFE_MS) == pytest.approx(12_200)


@pytest.mark.parametrize("slow", ["hand-over", "prefill", "decode"])
def test_a_cold_start_ends_no_hand_overs(slow: str) -> None:
    """A prompt of 1,000 tokens a second beside two streams: 300 ms where they decode, 110 with a hand-over. The first
    one everywhere is cold and takes 5 s. Two of ten at most run elsewhere than they should because of that."""
    speeds, seen_cold, handed_over = Speeds(), set[str](), 0

    def took_ms(what: str, usual_ms: int) -> int:
        cold = what == slow and what not in seen_cold
        seen_cold.add(what)
        return 5_000 if cold else usual_ms

    prompt = QueueEntry(AttemptId("r/1"), TenantId("t"), M, PriorityClass.STANDARD, 1_000, 10, NOW + 60_000)
    speeds.learn(FirstToken(N2, M, 1_000, took_ms("decode", 100)), NOW)  # the streams began where they decode
    for number in range(1, 11):
        now = NOW + 1_000 * number
        first, then = (
            Offer(key, M, 8, b"", part, *_rounded(speeds.of(key, M, now)), handoff_us)
            for key, part, handoff_us in (
                (N1, Part.PREFILL, round(speeds.handoff_us(M, now))),
                (N2, Part.DECODE, 0),
            )
        )
        apart = choose_seats([first, then], {N2: 2}, prompt).prefill is not None
        handed_over += apart
        where, what = (N1, "prefill") if apart else (N2, "decode")
        speeds.learn(FirstToken(where, M, 1_000, took_ms(what, 100)), now)
        speeds.learn_handoff(M, took_ms("hand-over", 10) if apart else 0, now)
    assert handed_over >= 8


def _rounded(speed: Speed) -> tuple[int, int]:
    return round(speed.token_us), round(speed.first_us)
