"""Webhooks of the billing stream: what is signed, and what follows from an answer. Pure.

Signatures are those of the Standard Webhooks specification (v1: HMAC-SHA256 over `id.timestamp.body`), so receivers can
use its libraries. An endpoint gets records in ledger order, one at a time; one that is not taken is tried again on a
fixed schedule and then put aside as dead, so that a broken endpoint delays its records and never loses one silently.
"""

import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass
from typing import Final

SECRET_MARK: Final = "whsec_"  # noqa: S105 - how a secret begins
SECRET_BYTES: Final = 32
RETRY_AFTER_MS: Final = tuple(
    1000 * seconds for seconds in (5, 30, 120, 600, 1_800, 3_600, 7_200, 14_400, 28_800, 43_200)
)
"""Waits after the first, second … failed attempt: about 28 hours in all, a guess at how long a receiver may be down."""
JITTER: Final = 0.2  # of a wait, so that many endpoints of one receiver do not come back together
_OK: Final = range(200, 300)
_GONE: Final = 410


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where records go. `tenant_id` empty: everybody's. `sequence` is the last ledger row that is dealt with."""

    endpoint_id: str
    url: str
    secret: str
    tenant_id: str = ""
    sequence: int = 0
    attempts: int = 0  # failed ones of the record after `sequence`
    next_ms: int = 0  # when to try it again
    active: bool = True
    last_error: str = ""
    created_ms: int = 0


@dataclass(frozen=True, slots=True)
class Taken:
    """The receiver has the record."""


@dataclass(frozen=True, slots=True)
class TryAgain:
    """Not now; at this instant."""

    at_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class Dead:
    """Tried often enough; the record is put aside."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unwanted:
    """The receiver says that it wants nothing more (410): the endpoint is switched off."""

    reason: str


Step = Taken | TryAgain | Dead | Unwanted


@dataclass(frozen=True, slots=True)
class Answer:
    """How an attempt ended: a status, or 0 and why there is none. `retry_after_s` is what the receiver asked for."""

    status: int
    reason: str = ""
    retry_after_s: int = 0


def step_after(answer: Answer, attempts: int, now_ms: int, chance: float) -> Step:
    """What follows. `attempts` counts failed ones of this record before this one; `chance` is in [0, 1)."""
    if answer.status in _OK:
        return Taken()
    reason = answer.reason or f"HTTP {answer.status}"
    if answer.status == _GONE:
        return Unwanted(reason)
    if attempts >= len(RETRY_AFTER_MS):
        return Dead(reason)
    wait_ms = RETRY_AFTER_MS[attempts] * (1 + JITTER * (2 * chance - 1))
    asked_ms = min(answer.retry_after_s * 1000, RETRY_AFTER_MS[-1])
    return TryAgain(now_ms + max(round(wait_ms), asked_ms), reason)


def signature(secret: str, message_id: str, timestamp_s: int, body: bytes) -> str:
    """The value of `webhook-signature`. Raises ValueError if the secret is none."""
    signed = f"{message_id}.{timestamp_s}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(secret_bytes(secret), signed, hashlib.sha256)).decode()


def secret_text(secret: bytes) -> str:
    """How a secret is given to people."""
    return SECRET_MARK + base64.b64encode(secret).decode()


def secret_bytes(secret: str) -> bytes:
    """The bytes of a secret. Raises ValueError if it is none, or shorter than 24 bytes (as the specification asks)."""
    try:
        raw = base64.b64decode(secret.removeprefix(SECRET_MARK), validate=True)
    except binascii.Error as error:
        raise ValueError("a secret is whsec_ and base64") from error
    if not 24 <= len(raw) <= 64:
        raise ValueError("a secret has 24 to 64 bytes")
    return raw
