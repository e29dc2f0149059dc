"""Answers that are kept for whoever repeats a request with the same `Idempotency-Key`: words and bounds. Pure.

A key is the tenant's. The first request with it claims it and runs; a twin waits for the first; later ones get what was
kept, for a day, and are neither run nor billed. The same key with another body is a mistake of the caller.
"""

from dataclasses import dataclass
from hashlib import sha256

from roundhouse.errors import InvalidInput

HEADER = "idempotency-key"
KEPT_MS = 24 * 3600 * 1000
LEASE_MS = 15_000  # a gateway that died gives the claim to a twin within this time
RENEW_MS = 5_000
ANSWER_BYTES_MAX = 1024 * 1024  # a guess: a stream of 4,096 tokens is about 900 kB
TENANT_BYTES_MAX = 64 * 1024 * 1024  # a guess: kept answers of one tenant in the store's memory
TENANT_ANSWERS_MAX = 10_000  # a guess
KEY_CHARACTERS_MAX = 255


@dataclass(frozen=True, slots=True)
class Answer:
    """What was answered. `headers` are those that describe the body; `request_id` is the first request's."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    request_id: str


@dataclass(frozen=True, slots=True)
class Claimed:
    """Run it, and keep or release it."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Somebody runs it now: ask again soon."""


@dataclass(frozen=True, slots=True)
class Kept:
    """It has been answered. None: with more than is kept."""

    answer: Answer | None


@dataclass(frozen=True, slots=True)
class Differs:
    """The key was used for another body."""


@dataclass(frozen=True, slots=True)
class Full:
    """The tenant has too much kept; the oldest ends in `retry_after_ms`."""

    retry_after_ms: int


Claim = Claimed | Busy | Kept | Differs | Full


def checked_key(text: str) -> str:
    """The key, if it can be one. Raises InvalidInput."""
    if not 0 < len(text) <= KEY_CHARACTERS_MAX or not (text.isascii() and text.isprintable()):
        raise InvalidInput(f"must be 1 to {KEY_CHARACTERS_MAX} printable ASCII characters", param=HEADER)
    return text


def fingerprint(path: str, body: bytes) -> str:
    """What must be the same for a request to be the same. `body` in a form in which equal JSON is equal."""
    return sha256(path.encode() + b"\0" + body).hexdigest()
