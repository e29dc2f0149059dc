"""The arithmetic of limits, with the numbers shown. tests/property/test_limits.py holds the scripts to the same."""

from dataclasses import replace

import pytest

from services.gateway.domain.limits import (
    LEASE_MS,
    Ask,
    Ended,
    LimitName,
    Meter,
    Refused,
    Taken,
    TenantUse,
    admit,
    give_back_points,
    renew,
    settle,
    withdraw,
)

NOTHING = TenantUse()


def ask(request_id: str, tokens: int = 1, **limits: int) -> Ask:
    """A request under these limits; limits that are not named do not exist."""
    given = {"requests_per_minute": None, "tokens_per_minute": None, "concurrent_requests": None, **limits}
    return Ask(request_id, tokens, **given)  # type: ignore[arg-type]  # `also` is not among them


def taken(use: TenantUse, wanted: Ask, now_ms: int = 0) -> TenantUse:
    """The use after a request that must be admitted."""
    after, answer = admit(use, wanted, now_ms)
    assert isinstance(answer, Taken)
    return after


def test_a_meter_drains_its_rate_a_minute() -> None:
    """60 a minute: 3 units of 60,000 points, 60 points a millisecond; 1 s drains one unit."""
    assert Meter(180_000, 0).at(1_000, 60) == Meter(120_000, 1_000)
    assert Meter(180_000, 0).at(10_000, 60) == Meter(0, 10_000)


def test_a_clock_that_goes_back_drains_nothing_and_keeps_its_time() -> None:
    """After a failover the new store's clock may be behind: time that was counted is not counted twice."""
    assert Meter(180_000, 1_000).at(500, 60) == Meter(180_000, 1_000)


@pytest.mark.parametrize("rate", [1, 7, 59, 60, 61, 599, 1_000_000_000])
def test_exactly_the_limit_fits_at_once(rate: int) -> None:
    """B09: whatever the rate, its whole minute fits and nothing more, to the token."""
    use = taken(NOTHING, ask("a", tokens=rate, tokens_per_minute=rate))
    after, answer = admit(use, ask("b", tokens=1, tokens_per_minute=rate), 0)
    assert after is use
    assert isinstance(answer, Refused)
    wait_ms = answer.retry_after_ms
    assert wait_ms is not None
    assert (wait_ms - 1) * rate < 60_000 <= wait_ms * rate  # B12: the first millisecond at which one token has drained


def test_the_wait_named_is_the_first_moment_at_which_it_fits() -> None:
    """B12: refused one millisecond before, taken then."""
    use = taken(NOTHING, ask("a", tokens=100, tokens_per_minute=100))
    wanted = ask("b", tokens=33, tokens_per_minute=100)
    _, answer = admit(use, wanted, 0)
    assert answer == Refused(LimitName.TOKENS, 19_800)  # 33 × 60,000 / 100
    assert isinstance(admit(use, wanted, 19_799)[1], Refused)
    assert isinstance(admit(use, wanted, 19_800)[1], Taken)


def test_refused_changes_nothing() -> None:
    """Invariant 15: the very same use comes back."""
    use = taken(NOTHING, ask("a", concurrent_requests=1, requests_per_minute=9))
    after, answer = admit(use, ask("b", concurrent_requests=1, requests_per_minute=9), 5_000)
    assert after is use
    assert answer == Refused(LimitName.CONCURRENT, 1_000)


def test_never_beats_every_wait() -> None:
    """A request too large for its limit is told so, even if another limit would have room sooner or later."""
    limits = {"requests_per_minute": 1, "tokens_per_minute": 10}
    use = taken(NOTHING, ask("a", **limits))
    assert admit(use, ask("b", tokens=11, **limits), 0)[1] == Refused(LimitName.TOKENS, None)


def test_an_ended_request_is_not_admitted_again() -> None:
    """A call that arrives after its own settlement or withdrawal takes nothing."""
    limits = {"concurrent_requests": 1}
    settled = settle(taken(NOTHING, ask("a", **limits)), "a", 1, 10)
    assert admit(settled, ask("a", **limits), 20) == (settled, Ended())
    withdrawn = withdraw(NOTHING, "b", 0)
    assert admit(withdrawn, ask("b", **limits), 0) == (withdrawn, Ended())


def test_settling_what_was_never_admitted_changes_nothing() -> None:
    """Settling is idempotent and says nothing about requests it does not know."""
    use = taken(NOTHING, ask("a", tokens=5, tokens_per_minute=10))
    assert settle(use, "other", 3, 0) == use


def test_a_renewed_lease_runs_from_now() -> None:
    """B10: leases live `LEASE_MS` after the last renewal; unknown requests get none."""
    use = renew(taken(NOTHING, ask("a", concurrent_requests=1)), "a", 20_000)
    assert use.leases == {"a": 20_000 + LEASE_MS}
    assert renew(use, "unknown", 20_000) == use
    assert (use.running(20_000 + LEASE_MS - 1), use.running(20_000 + LEASE_MS)) == (1, 0)


@pytest.mark.parametrize(
    ("before", "cost", "kept", "drained", "back"),
    [
        (0, 100, 20, 0, 80),  # nothing drained: all that was not needed
        (0, 100, 20, 20, 80),  # only what was needed has drained
        (0, 100, 20, 50, 50),  # 30 of the 80 have drained
        (0, 100, 20, 100, 0),  # all has drained
        (0, 100, 20, 500, 0),  # and more of others
        (60, 100, 20, 50, 80),  # what stood before it drains first
        (60, 100, 20, 100, 60),  # 100 drained = 60 before + 20 kept + 20 of the 80
        (0, 100, 100, 0, 0),  # all was needed
    ],
)
def test_only_what_has_not_drained_is_given_back(before: int, cost: int, kept: int, drained: int, back: int) -> None:
    """The bucket drains from the bottom; `before` lies under the reservation."""
    assert give_back_points(before, cost, kept, drained) == back


def test_reservations_are_no_way_to_use_more_than_the_limit() -> None:
    """Invariant 13: reserving 100 of 100 a minute and using 1, again and again, stays within a bucket and the rate."""
    use, used, now_ms = NOTHING, 0, 0
    for number in range(500):
        use, answer = admit(use, ask(str(number), tokens=100, tokens_per_minute=100), now_ms)
        if isinstance(answer, Taken):
            use = settle(use, str(number), 1, now_ms + 100)
            used += 1
        now_ms += 100
    assert used <= 100 + 100 * now_ms // 60_000
    assert used >= 80  # 50 s: the reservation of 100 needs an empty meter, so 83 s-tokens drain meanwhile


def test_what_takes_no_tokens_is_not_refused_by_a_token_limit() -> None:
    """A tensor call reserves no tokens: it passes with the meter full, and with a limit of zero."""
    full = taken(NOTHING, ask("a", tokens=100, tokens_per_minute=100))
    assert isinstance(admit(full, ask("b", tokens=0, tokens_per_minute=100), 0)[1], Taken)
    assert isinstance(admit(full, ask("b", tokens=0, tokens_per_minute=0), 0)[1], Taken)


def test_tickets_and_leases_do_not_outlive_their_request() -> None:
    """Nothing but the ended mark is left of a settled request."""
    use = settle(taken(NOTHING, ask("a", requests_per_minute=5)), "a", 1, 0)
    assert (use.tickets, use.leases, use.ended) == ({}, {}, frozenset({"a"}))
    assert use.requests == replace(use.requests, points=60_000)  # the request itself stays counted
