"""How fast an instance is taken to be."""

from roundhouse.vocabulary import NodeId
from services.scheduler.domain.records import instance_key, version_key
from services.scheduler.domain.speeds import PRIOR_HANDOFF_US, PRIOR_TOKEN_US, FirstToken, Speed, Speeds

M = version_key("m", "sha256:1")
N1, N2 = (instance_key(NodeId(name), M) for name in ("n1", "n2"))


def test_nothing_known_is_the_prior_and_a_sibling_is_taken_as_alike() -> None:
    """1,000 tokens in 50 ms are 50 us each; an instance of the same version elsewhere is expected to be as fast."""
    speeds = Speeds()
    assert speeds.of(N1, M) == Speed(PRIOR_TOKEN_US, 0.0)
    speeds.learn(FirstToken(N1, M, 1_000, 50))
    assert speeds.of(N1, M) == speeds.of(N2, M) == Speed(50.0, 50_000.0)


def test_the_average_moves_by_a_fifth() -> None:
    """50 then 100 us: 0.8 x 50 + 0.2 x 100 = 60."""
    speeds = Speeds()
    speeds.learn(FirstToken(N1, M, 1_000, 50))
    speeds.learn(FirstToken(N1, M, 1_000, 100))
    assert speeds.of(N1, M).token_us == 60.0


def test_short_prompts_and_failures_say_nothing_of_the_prefill() -> None:
    """Five uncached tokens in 20 ms are mostly the round trip; no first token is no measurement."""
    speeds = Speeds()
    speeds.learn(FirstToken(N1, M, 1_000, 50))
    speeds.learn(FirstToken(N1, M, 5, 20))
    assert speeds.of(N1, M) == Speed(50.0, 0.8 * 50_000 + 0.2 * 20_000)
    speeds.learn(FirstToken(N1, M, 1_000, 0))
    assert speeds.of(N1, M).token_us == 50.0


def test_a_hand_over_is_taken_as_measured_and_a_slow_one_is_forgotten() -> None:
    """Before one was seen: the prior. 4 ms, then 9: 0.8 x 4 + 0.2 x 9 = 5 ms. One of 1,000 s is half forgotten after
    35 requests that stayed in one place: 0.98 ^ 35 = 0.49."""
    speeds = Speeds()
    assert speeds.handoff_us(M) == PRIOR_HANDOFF_US
    speeds.learn_handoff(M, 4)
    speeds.learn_handoff(M, 9)
    assert speeds.handoff_us(M) == 5_000.0
    other = version_key("other", "sha256:2")
    speeds.learn_handoff(other, 1_000_000)
    for _ in range(35):
        speeds.learn_handoff(other, 0)
    assert 0.48 * 10**9 < speeds.handoff_us(other) < 0.51 * 10**9
