"""Keys in Redis: made, listed and revoked.

Written in an order that never lets half a key work: the tenant's slot first (record and alive mark, one
script), the id → tenant pointer, and last the hash index through which callers are found. Revoking goes the other
way round: the alive mark, which every admission checks, goes first, so the key is dead everywhere with that one write.
"""

from dataclasses import replace
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from roundhouse.budgets import KEY_SCOPES, key_scope
from roundhouse.errors import NotFound, Unavailable
from roundhouse.redis_edge import LuaScript
from roundhouse.vocabulary import KeyId, TenantId
from services.gateway.adapters import redis_names
from services.gateway.adapters.key_directory import IndexEntry
from services.gateway.domain.keys import KeyRecord, ends_at

INDEX_SLACK_MS = 24 * 3600 * 1000  # the entry only has to go some day: expiry itself is checked by time, not by absence

_write = LuaScript("services.gateway.adapters", "key_note.lua")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(KeyRecord).decode


class RedisKeyRegistry:
    """`KeyRegistry` in Valkey or Redis."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def add(self, record: KeyRecord) -> None:
        """See `KeyRegistry.add`. Cancelled midway, the key may be listed but does not work yet: add it again."""
        try:
            if record.limits is not None and record.limits.budget is not None:  # before the key works: metering sums it
                scope = key_scope(record.family or record.key_id)
                await cast("Any", self._redis.hset(KEY_SCOPES, record.key_id, f"{record.tenant_id} {scope}"))
            await self._note(record, expires=str(record.expires_ms))
            await self._redis.set(redis_names.key_owner(record.key_id), record.tenant_id)
            await self._write_index(record, record.created_ms, only_existing=False)
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable("keys cannot be written now") from error

    async def revoke(self, key_id: KeyId, now_ms: int) -> KeyRecord:
        """See `KeyRegistry.revoke`. Cancelled midway, the key is dead or untouched: revoke it again."""
        try:
            return await self._revoke(key_id, now_ms)
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable("keys cannot be written now") from error

    async def find(self, key_id: KeyId) -> KeyRecord:
        """See `KeyRegistry.find`."""
        try:
            return await self._find(key_id)
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable("keys cannot be read now") from error

    async def end_at(self, key_id: KeyId, at_ms: int, *, now_ms: int) -> KeyRecord:
        """See `KeyRegistry.end_at`. Cancelled midway, the key ends then or is untouched: call again."""
        try:
            record = await self._find(key_id)
            ending = ends_at(record, at_ms)
            if record.revoked_ms or ending == record:
                return ending
            if not await self._note(ending, expires=str(ending.expires_ms)):
                return await self._find(key_id)  # it was revoked meanwhile
            await self._write_index(ending, now_ms, only_existing=True)  # a key that is revoked now has none
            return ending
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable("keys cannot be written now") from error

    async def of_tenant(self, tenant_id: TenantId) -> list[KeyRecord]:
        """See `KeyRegistry.of_tenant`."""
        try:
            found = await cast("Any", self._redis.hvals(redis_names.key_records(tenant_id)))
        except (RedisError, OSError, TimeoutError) as error:
            raise Unavailable("keys cannot be read now") from error
        return sorted((_decode(data) for data in found), key=lambda record: (record.created_ms, record.key_id))

    async def _write_index(self, record: KeyRecord, now_ms: int, *, only_existing: bool) -> None:
        entry = IndexEntry(
            tenant=record.tenant_id,
            key_id=record.key_id,
            scopes=tuple(sorted(record.scopes)),
            expires_ms=record.expires_ms,
            limits=record.limits,
            family=record.family,
        )
        kept_ms = max(0, record.expires_ms - now_ms) + INDEX_SLACK_MS if record.expires_ms else None
        await self._redis.set(redis_names.key_index(record.key_hash), _encode(entry), px=kept_ms, xx=only_existing)

    async def _find(self, key_id: KeyId) -> KeyRecord:
        owner = await self._redis.get(redis_names.key_owner(key_id))
        data = owner and await cast("Any", self._redis.hget(redis_names.key_records(TenantId(owner.decode())), key_id))
        if not data:
            raise NotFound("there is no such key", code="key_not_found")
        return _decode(data)

    async def _revoke(self, key_id: KeyId, now_ms: int) -> KeyRecord:
        record = await self._find(key_id)
        revoked = replace(record, revoked_ms=record.revoked_ms or now_ms)
        await self._note(revoked, expires="")
        await self._redis.delete(redis_names.key_index(record.key_hash))
        return revoked

    async def _note(self, record: KeyRecord, *, expires: str) -> bool:
        """False: the key is revoked, and is not alive again by this."""
        keys = [redis_names.key_records(record.tenant_id), redis_names.alive_keys(record.tenant_id)]
        values = [record.key_id, _encode(record).decode(), record.key_hash, expires]
        return bool(await _write(self._redis, keys, values))
