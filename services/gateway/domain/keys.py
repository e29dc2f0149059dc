"""What a key is: its text, its hash, and the record that is kept of it. No store, no chance, no clock.

The text is shown once, when the key is made, and kept nowhere; everything else goes by its SHA-256. A fast hash is
right here: the text has 256 bits of chance, so there is nothing to guess. Decision: docs/decisions/0083-keys.md.
"""

import re
from base64 import urlsafe_b64encode
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256

from roundhouse.catalogue.records import ScopeLimits
from roundhouse.vocabulary import KeyId, TenantId

INFERENCE = "inference"
USAGE_READ = "usage:read"
ADMIN = "admin"
SCOPES = frozenset({INFERENCE, USAGE_READ, ADMIN})

OPERATORS = TenantId("-operators")
"""Whom admin keys belong to. No tenant can have this name: names begin with a letter or digit."""

BOOTSTRAP_KEY_ID = KeyId("bootstrap")

SECRET_BYTES = 32
KEY_ID_BYTES = 6
_WELL_FORMED = re.compile(r"rh-[A-Za-z0-9_-]{22,128}")  # 22 characters hold 128 bits


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One key as operators see it. `expires_ms` and `revoked_ms` are Unix times; 0 = never.

    `limits` are the key's own, beside its tenant's. `replaces` is the key that this one was made to follow, `family`
    the first of that line: its budget is that of all of them together."""

    key_id: KeyId
    tenant_id: TenantId
    key_hash: str
    scopes: frozenset[str]
    label: str
    created_ms: int
    expires_ms: int
    revoked_ms: int = 0
    limits: ScopeLimits | None = None
    replaces: KeyId | None = None
    family: KeyId | None = None

    def state(self, now_ms: int) -> str:
        """`active`, `expired` or `revoked`."""
        if self.revoked_ms:
            return "revoked"
        return "expired" if has_expired(self.expires_ms, now_ms) else "active"


def key_text(secret: bytes) -> str:
    """The text of a key made of `SECRET_BYTES` random bytes."""
    assert len(secret) == SECRET_BYTES
    return "rh-" + urlsafe_b64encode(secret).rstrip(b"=").decode()


def key_id(chance: bytes) -> KeyId:
    """The public name of a key; says nothing about its text."""
    return KeyId(f"key-{chance.hex()}")


def key_hash(text: str) -> str:
    """SHA-256 of the text, in hex: what stores and caches know of a key."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def well_formed(text: str) -> bool:
    """Whether the text could be a key. Not secret: the format is public."""
    return _WELL_FORMED.fullmatch(text) is not None


def ends_at(record: KeyRecord, at_ms: int) -> KeyRecord:
    """The key with this end, or with its own if that is earlier: rotating a key never makes it live longer."""
    sooner = at_ms if record.expires_ms == 0 else min(record.expires_ms, at_ms)
    return replace(record, expires_ms=sooner)


def has_expired(expires_ms: int, now_ms: int) -> bool:
    """Whether a key with this end (0 = none) is past it."""
    return expires_ms != 0 and expires_ms <= now_ms


def unknown_scopes(scopes: Iterable[str]) -> list[str]:
    """Scopes that there are not, sorted."""
    return sorted(set(scopes) - SCOPES)
