"""What is signed, when a record is tried again, and when it is given up."""

import base64
import hashlib
import hmac
from random import Random

import pytest

from services.metering.domain.webhooks import (
    JITTER,
    RETRY_AFTER_MS,
    Answer,
    Dead,
    Taken,
    TryAgain,
    Unwanted,
    secret_bytes,
    secret_text,
    signature,
    step_after,
)

NOW_MS = 1_000_000
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def test_the_signature_is_that_of_the_specification() -> None:
    """The example of the Standard Webhooks specification's own libraries."""
    body = b'{"test": 2432232314}'
    assert signature(SECRET, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body) == (
        "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    )


def test_a_receiver_can_check_it_with_nothing_but_the_standard_library() -> None:
    """HMAC-SHA256 over id, timestamp and body, joined by dots."""
    made = signature(secret_text(b"k" * 32), "id", 7, b"{}")
    expected = hmac.new(b"k" * 32, b"id.7.{}", hashlib.sha256).digest()
    assert base64.b64decode(made.removeprefix("v1,")) == expected


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_!!", "whsec_c2hvcnQ=", secret_text(b"k" * 65)])
def test_a_weak_or_broken_secret_is_refused(secret: str) -> None:
    """Too short, too long, no base64."""
    with pytest.raises(ValueError):
        secret_bytes(secret)


@pytest.mark.parametrize("status", [200, 202, 204, 299])
def test_any_success_is_taken(status: int) -> None:
    """2xx."""
    assert step_after(Answer(status), 0, NOW_MS, Random(1).random()) == Taken()


@pytest.mark.parametrize("status", [0, 199, 301, 302, 400, 401, 404, 429, 500, 503])
def test_everything_else_is_tried_again_on_the_schedule_and_then_dead(status: int) -> None:
    """Each wait within its jitter; after the last one the record is given up, with the reason."""
    for attempts, wait_ms in enumerate(RETRY_AFTER_MS):
        step = step_after(Answer(status, "no"), attempts, NOW_MS, Random(attempts).random())
        assert isinstance(step, TryAgain)
        assert wait_ms * (1 - JITTER) <= step.at_ms - NOW_MS <= wait_ms * (1 + JITTER)
    assert step_after(Answer(status, "no"), len(RETRY_AFTER_MS), NOW_MS, Random(1).random()) == Dead("no")


def test_a_receiver_may_ask_for_more_time_but_not_for_ever() -> None:
    """Retry-After of a minute is kept; one of a year is cut to the longest wait."""
    later = step_after(Answer(503, retry_after_s=60), 0, NOW_MS, Random(1).random())
    assert later == TryAgain(NOW_MS + 60_000, "HTTP 503")
    year = step_after(Answer(503, retry_after_s=365 * 86_400), 0, NOW_MS, Random(1).random())
    assert year == TryAgain(NOW_MS + RETRY_AFTER_MS[-1], "HTTP 503")


def test_gone_means_that_nothing_more_is_wanted() -> None:
    """410 switches the endpoint off."""
    assert step_after(Answer(410), 0, NOW_MS, Random(1).random()) == Unwanted("HTTP 410")
