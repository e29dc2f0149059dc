"""Resolves key texts against the key index in Redis, with a small memory of what it found.

The index entry of a key hardly changes, so it may be remembered; whether the key is still alive is asked where it
counts: by admission.lua, or here with `fresh`. What is remembered is also read again every second, so that a
revoked key is forgotten even by code that asks neither (case B06). Texts are hashed at once and never kept or logged
(invariant 16).
"""

from collections import OrderedDict
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from roundhouse.catalogue.records import ScopeLimits
from roundhouse.clock import Clock
from roundhouse.errors import Unauthenticated, Unavailable
from roundhouse.vocabulary import KeyId, TenantId
from services.gateway.adapters import redis_names
from services.gateway.domain import keys
from services.gateway.ports import Caller

KNOWN_MS = 800  # with `READING_MS` the bound of case B06, a second, for code that neither admits nor asks `fresh`
READING_MS = 200  # so long others still use what is known of a key that one of them reads again
UNKNOWN_MS = 1_000  # a key made just now works within this time where it was tried before
ENTRIES_MAX = 10_000  # a guess: every key of a few thousand tenants, about 5 MB


class IndexEntry(msgspec.Struct, frozen=True):
    """What the index holds of a key."""

    tenant: TenantId
    key_id: KeyId
    scopes: tuple[str, ...]
    expires_ms: int  # 0 = never
    limits: ScopeLimits | None = None
    family: KeyId | None = None


@dataclass(frozen=True, slots=True)
class _Remembered:
    entry: IndexEntry | None  # None: there is no such key
    until_ms: int  # monotonic
    being_read: bool = False  # again, by a caller that waits for it


_decode = msgspec.json.Decoder(IndexEntry).decode


class RedisKeyDirectory:
    """`KeyDirectory` in Valkey or Redis. `admin_key_hash` is the bootstrap admin key's SHA-256, hex; empty = none."""

    def __init__(self, redis: Redis, clock: Clock, *, admin_key_hash: str = "") -> None:
        self._redis = redis
        self._clock = clock
        self._admin_key_hash = admin_key_hash.strip().lower()
        self._memory: OrderedDict[str, _Remembered] = OrderedDict()

    async def identify(self, key_text: str, *, fresh: bool = False) -> Caller:
        """See `KeyDirectory.identify`. A cancelled call leaves nothing behind."""
        if not keys.well_formed(key_text):
            raise _not_valid()
        key_hash = keys.key_hash(key_text)
        if self._admin_key_hash and compare_digest(key_hash, self._admin_key_hash):
            return Caller(keys.OPERATORS, keys.BOOTSTRAP_KEY_ID, frozenset({keys.ADMIN}), key_hash)
        entry = await self._entry(key_hash)
        if entry is None or keys.has_expired(entry.expires_ms, self._clock.now_ms()):
            raise _not_valid()
        if fresh and not await self._is_alive(entry.tenant, key_hash):
            self._remember(key_hash, None, UNKNOWN_MS)
            raise _not_valid()
        return Caller(entry.tenant, entry.key_id, frozenset(entry.scopes), key_hash, entry.limits, family=entry.family)

    async def _entry(self, key_hash: str) -> IndexEntry | None:
        remembered = self._memory.get(key_hash)
        if remembered is not None and remembered.until_ms > self._clock.monotonic_ms():
            return remembered.entry
        if remembered is not None and not remembered.being_read:
            self._remember(key_hash, remembered.entry, READING_MS, since_ms=remembered.until_ms, being_read=True)
        data = await self._read(self._redis.get(redis_names.key_index(key_hash)))
        entry = None if data is None else _decode(data)
        self._remember(key_hash, entry, UNKNOWN_MS if entry is None else KNOWN_MS)
        return entry

    async def _is_alive(self, tenant_id: TenantId, key_hash: str) -> bool:
        expires = await self._read(self._redis.hget(redis_names.alive_keys(tenant_id), key_hash))
        return expires is not None and not keys.has_expired(int(expires), self._clock.now_ms())

    async def _read(self, call: Any) -> bytes | None:
        try:
            return cast("bytes | None", await call)
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable("keys cannot be checked now") from error

    def _remember(
        self,
        key_hash: str,
        entry: IndexEntry | None,
        duration_ms: int,
        *,
        since_ms: int | None = None,
        being_read: bool = False,
    ) -> None:
        since_ms = self._clock.monotonic_ms() if since_ms is None else since_ms
        self._memory[key_hash] = _Remembered(entry, since_ms + duration_ms, being_read)
        self._memory.move_to_end(key_hash)
        if len(self._memory) > ENTRIES_MAX:
            self._memory.popitem(last=False)


def _not_valid() -> Unauthenticated:
    # One message for unknown, revoked and expired: which it is would help only someone who guesses.
    return Unauthenticated("the API key is not valid")
