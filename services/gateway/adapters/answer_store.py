"""`AnswerStore` in Redis: the one place of the mesh where completions rest, so they are encrypted and bounded.

An answer is encrypted with a key made of the tenant's name and the text of its idempotency key; the store only has the
text's digest. Whoever reads the store can therefore read an answer only by guessing the key, which is a UUID in every
common client. Everything of a tenant has its hash tag, ends after a day, and `erase` removes it at once. The script
lies beside this file. Decision: docs/decisions/0098-idempotency.md.
"""

import secrets
from hashlib import sha256
from typing import Any

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from redis.asyncio import Redis

from roundhouse.clock import Clock
from roundhouse.redis_edge import LuaScript
from roundhouse.vocabulary import TenantId
from services.gateway.domain.idempotency import (
    ANSWER_BYTES_MAX,
    KEPT_MS,
    LEASE_MS,
    TENANT_ANSWERS_MAX,
    TENANT_BYTES_MAX,
    Answer,
    Busy,
    Claim,
    Claimed,
    Differs,
    Full,
    Kept,
)

NONCE_BYTES = 12  # AES-GCM's own
_PURPOSE = b"roundhouse/kept-answer/v1"

_answers = LuaScript("services.gateway.adapters", "answers.lua")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Answer).decode


class RedisAnswerStore:
    """`AnswerStore` in Valkey or Redis. `clock` replaces the store's own; only tests move time."""

    def __init__(self, redis: Redis, *, clock: Clock | None = None) -> None:
        self._redis = redis
        self._clock = clock

    async def claim(self, tenant_id: TenantId, key: str, fingerprint: str, owner: str) -> Claim:
        """See `AnswerStore.claim`."""
        digest = _digest(tenant_id, key)
        bounds = [LEASE_MS, KEPT_MS, TENANT_ANSWERS_MAX, TENANT_BYTES_MAX]
        answer = await self._run(tenant_id, digest, "claim", digest, fingerprint, owner, *bounds)
        match answer[0]:
            case b"claimed":
                return Claimed()
            case b"busy":
                return Busy()
            case b"kept":
                return Kept(_opened(tenant_id, key, answer[1]) if answer[1] else None)
            case b"differs":
                return Differs()
            case b"full":
                return Full(int(answer[1]))
        raise AssertionError(f"answers.lua answered {answer[0]!r}")

    async def renew(self, tenant_id: TenantId, key: str, owner: str) -> None:
        """See `AnswerStore.renew`."""
        await self._run(tenant_id, _digest(tenant_id, key), "renew", owner, LEASE_MS)

    async def keep(self, tenant_id: TenantId, key: str, owner: str, answer: Answer) -> None:
        """See `AnswerStore.keep`."""
        digest = _digest(tenant_id, key)
        sealed = _sealed(tenant_id, key, answer) if len(answer.body) <= ANSWER_BYTES_MAX else b""
        await self._run(tenant_id, digest, "keep", digest, owner, sealed)

    async def release(self, tenant_id: TenantId, key: str, owner: str) -> None:
        """See `AnswerStore.release`."""
        digest = _digest(tenant_id, key)
        await self._run(tenant_id, digest, "release", digest, owner)

    async def erase(self, tenant_id: TenantId) -> int:
        """See `AnswerStore.erase`."""
        return int(await self._run(tenant_id, "", "erase"))

    async def _run(self, tenant_id: TenantId, digest: str, what: str, *arguments: str | bytes | int) -> Any:
        keys = [
            f"rh:{{t:{tenant_id}}}:answer:{digest}",  # hash: the claim or the kept answer of one key
            f"rh:{{t:{tenant_id}}}:answers",  # sorted set: digests of keys by when they end, ms
            f"rh:{{t:{tenant_id}}}:answer_bytes",  # hash: digest of a key → bytes kept for it; and their `total`
        ]
        now: str | int = "" if self._clock is None else self._clock.now_ms()
        return await _answers(self._redis, keys, [what, now, *arguments])


def _digest(tenant_id: TenantId, key: str) -> str:
    return sha256(b"\0".join((_PURPOSE, tenant_id.encode(), key.encode()))).hexdigest()


def _cipher(tenant_id: TenantId, key: str) -> AESGCM:
    derived = HKDF(SHA256(), length=32, salt=tenant_id.encode(), info=_PURPOSE).derive(key.encode())
    return AESGCM(derived)


def _sealed(tenant_id: TenantId, key: str, answer: Answer) -> bytes:
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + _cipher(tenant_id, key).encrypt(nonce, _encode(answer), None)


def _opened(tenant_id: TenantId, key: str, sealed: bytes) -> Answer | None:
    try:
        return _decode(_cipher(tenant_id, key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], None))
    except (InvalidTag, msgspec.MsgspecError):
        return None  # as if it had been too long to keep: better no answer than a changed one
