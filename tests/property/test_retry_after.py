"""The wait that a refusal names is enough, and not a millisecond too long (case B12): over all limits and histories."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.domain.limits import Ask, Refused, ScopedLimits, Taken, TenantUse, admit, settle

RATES = st.none() | st.integers(1, 200) | st.sampled_from([7, 59, 60, 61, 1_000_000])
STEPS = st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 60), st.integers(0, 60)), max_size=25)


@settings(max_examples=400, deadline=None)
@given(requests=RATES, tokens=RATES, key=RATES, model=RATES, steps=STEPS, wanted=st.integers(0, 60))
def test_the_named_wait_is_the_first_millisecond_with_room(
    requests: int | None,
    tokens: int | None,
    key: int | None,
    model: int | None,
    steps: list[tuple[int, int, int]],
    wanted: int,
) -> None:
    """After any history of requests that end at once: refused with a wait w means refused at w - 1, taken at w.

    Only rates are asked: nobody knows when a running request ends, so concurrency names a guess."""
    also = (ScopedLimits("k:1", requests_per_minute=key), ScopedLimits("m:1", tokens_per_minute=model))

    def ask(name: str, reserve: int) -> Ask:
        return Ask(name, reserve, requests, tokens, None, also)

    use, now_ms = TenantUse(), 0
    for number, (pause_ms, reserve, used) in enumerate(steps):
        now_ms += pause_ms
        use, answer = admit(use, ask(f"r{number}", reserve), now_ms)
        if isinstance(answer, Taken):
            use = settle(use, f"r{number}", used, now_ms)
    after, answer = admit(use, ask("last", wanted), now_ms)
    if not isinstance(answer, Refused):
        return
    assert after is use  # invariant 15: refused changes nothing
    wait_ms = answer.retry_after_ms
    if wait_ms is None:  # it alone is more than a whole minute's limit: no wait would be true
        assert any(limit is not None and wanted > limit for limit in (tokens, model))
        return
    assert wait_ms > 0
    assert isinstance(admit(use, ask("early", wanted), now_ms + wait_ms - 1)[1], Refused)
    assert isinstance(admit(use, ask("late", wanted), now_ms + wait_ms)[1], Taken)
