"""Tokens of an OIDC issuer as an alternative to keys: who they say calls, checked against the issuer's public keys.

Only the algorithms that are set are believed, all of them asymmetric: `none` and shared-secret ones cannot be set, so
that nobody signs with a public key as if it were a secret. The key set is fetched when first needed and kept; a token
that names an unknown key has it fetched again, but at most every `FETCH_MS_MIN`, so that made-up key ids cost the
issuer nothing. Tokens are never kept or logged, and a refusal says nothing of what was wrong (invariant 16).
Sources: RFC 7519, RFC 8725 (best current practice), OpenID Connect Discovery 1.0.
Decision: docs/decisions/0085-issuer-tokens.md.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import httpx
import structlog
from joserfc import jwt
from joserfc.errors import InvalidKeyIdError
from joserfc.jwk import KeySet

from roundhouse.catalogue.shape import NAME_PATTERN
from roundhouse.clock import Clock
from roundhouse.errors import Unauthenticated, Unavailable
from roundhouse.vocabulary import KeyId, TenantId
from services.gateway.domain import keys
from services.gateway.ports import Caller, KeyDirectory

log = structlog.get_logger(__name__)

FETCH_MS_MIN = 10_000  # a guess: soon enough for a rotation, rare enough for an issuer
REFRESH_MS = 600_000  # a guess: a key that the issuer withdrew is believed no longer than this while the issuer answers
FETCH_TIMEOUT_S = 3.0
KEY_SET_BYTES_MAX = 256 * 1024
TOKEN_CHARACTERS_MAX = 8_192  # below what proxies take as a header
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
_ASYMMETRIC = frozenset({"RSA", "EC", "OKP"})
_TENANT = re.compile(NAME_PATTERN)
_SHAPE = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Issuer:
    """Who is believed, and what the claims mean. `key_set_url` empty: found by OpenID Connect discovery."""

    name: str  # the `iss` claim
    audience: str
    key_set_url: str = ""
    algorithms: tuple[str, ...] = ("RS256", "ES256")
    tenant_claim: str = "tenant"  # dots go into objects
    scope_claim: str = "scope"  # words in a string, or a list of strings
    scopes: Mapping[str, str] | None = None  # word of the issuer → our scope; None: our words but `admin`
    leeway_s: int = 30


class IdentityTokens:
    """Verifies tokens of one issuer."""

    def __init__(self, issuer: Issuer, client: httpx.AsyncClient, clock: Clock) -> None:
        assert set(issuer.algorithms) <= set(ALGORITHMS), "settings allow asymmetric algorithms only"
        self._issuer = issuer
        self._client = client
        self._clock = clock
        self._keys: KeySet | None = None
        self._tried_ms: int | None = None  # monotonic; when the key set was last asked for
        self._good_ms = 0  # monotonic; when it last came
        self._fetching = asyncio.Lock()

    @staticmethod
    def looks_like(text: str) -> bool:
        """Whether the text could be a token. Keys never do: they have no dots."""
        return len(text) <= TOKEN_CHARACTERS_MAX and _SHAPE.fullmatch(text) is not None

    async def identify(self, text: str) -> Caller:
        """Who calls. Raises Unauthenticated (one message for all), Unavailable while no key set can be had."""
        key_set = await self._key_set()
        try:
            token = self._decoded(text, key_set)
        except InvalidKeyIdError:
            token = self._decoded_again(text, await self._fetched(key_set))
        return self._caller(token.claims)

    def _decoded(self, text: str, key_set: KeySet) -> jwt.Token:
        try:
            token = jwt.decode(text, key_set, algorithms=list(self._issuer.algorithms))
            self._claims().validate(token.claims)
        except InvalidKeyIdError:
            raise
        except Exception as error:  # whatever a stranger's text does to the library, the token is not good
            raise _not_valid() from error
        return token

    def _decoded_again(self, text: str, key_set: KeySet) -> jwt.Token:
        try:
            return self._decoded(text, key_set)
        except InvalidKeyIdError as error:
            raise _not_valid() from error

    def _claims(self) -> jwt.JWTClaimsRegistry:
        return jwt.JWTClaimsRegistry(
            now=self._clock.now_ms() // 1000,
            leeway=self._issuer.leeway_s,
            iss={"essential": True, "value": self._issuer.name},
            aud={"essential": True, "value": self._issuer.audience},
            exp={"essential": True},
            sub={"essential": True},
        )

    def _caller(self, claims: Mapping[str, Any]) -> Caller:
        scopes = self._scopes(claims)
        subject = sha256(f"{self._issuer.name}\0{claims['sub']}".encode()).hexdigest()[:12]
        key_id = KeyId(f"jwt-{subject}")
        expires_ms = (int(claims["exp"]) + self._issuer.leeway_s) * 1000
        if keys.ADMIN in scopes:  # as with keys: who administers belongs to no tenant
            return Caller(keys.OPERATORS, key_id, frozenset({keys.ADMIN}), "", expires_ms=expires_ms)
        tenant = _claim(claims, self._issuer.tenant_claim)
        if not isinstance(tenant, str) or _TENANT.fullmatch(tenant) is None or not scopes:
            raise _not_valid()
        return Caller(TenantId(tenant), key_id, frozenset(scopes), "", expires_ms=expires_ms)

    def _scopes(self, claims: Mapping[str, Any]) -> set[str]:
        told = _claim(claims, self._issuer.scope_claim)
        words = told.split() if isinstance(told, str) else told if isinstance(told, list) else []
        known = self._issuer.scopes
        if known is None:
            known = {scope: scope for scope in keys.SCOPES - {keys.ADMIN}}
        return {known[word] for word in words if isinstance(word, str) and word in known}

    async def _key_set(self) -> KeySet:
        if self._keys is None or self._clock.monotonic_ms() - self._good_ms > REFRESH_MS:
            return await self._fetched(self._keys)
        return self._keys

    async def _fetched(self, seen: KeySet | None) -> KeySet:
        """A newer key set than `seen`, if it may be asked for now; else the one there is. Raises Unavailable."""
        async with self._fetching:  # one at a time: the others find what it brought
            if self._keys is None or self._keys is seen:
                await self._fetch()
            if self._keys is None:
                raise Unavailable("tokens cannot be checked now", retry_after_ms=FETCH_MS_MIN)
            return self._keys

    async def _fetch(self) -> None:
        now_ms = self._clock.monotonic_ms()
        if self._tried_ms is not None and now_ms - self._tried_ms < FETCH_MS_MIN:
            return
        self._tried_ms = now_ms
        try:
            self._keys = _public_keys(await self._json(await self._url()))
            self._good_ms = now_ms
            log.info("issuer_keys_fetched", keys=len(self._keys.keys))
        except Exception as error:  # noqa: BLE001 - an issuer may answer anything; what was known before still holds
            log.warning("issuer_keys_not_fetched", error=type(error).__name__)

    async def _url(self) -> str:
        if self._issuer.key_set_url:
            return self._issuer.key_set_url
        found = await self._json(self._issuer.name.rstrip("/") + "/.well-known/openid-configuration")
        if found["issuer"] != self._issuer.name:
            raise ValueError("the discovery document is another issuer's")
        return str(found["jwks_uri"])

    async def _json(self, url: str) -> Any:
        async with self._client.stream("GET", url, timeout=FETCH_TIMEOUT_S) as answer:
            answer.raise_for_status()
            data = bytearray()
            async for piece in answer.aiter_bytes():
                data += piece
                if len(data) > KEY_SET_BYTES_MAX:
                    raise ValueError("the document is too long")
        return httpx.Response(200, content=bytes(data)).json()


class KeysAndTokens:
    """`KeyDirectory` that takes keys and tokens. A token is checked anew on every call, so it is always fresh."""

    def __init__(self, key_directory: KeyDirectory, tokens: IdentityTokens) -> None:
        self._keys = key_directory
        self._tokens = tokens

    async def identify(self, key_text: str, *, fresh: bool = False) -> Caller:
        """See `KeyDirectory.identify`."""
        if self._tokens.looks_like(key_text):
            return await self._tokens.identify(key_text)
        return await self._keys.identify(key_text, fresh=fresh)


def _public_keys(document: Any) -> KeySet:
    usable = [
        key for key in document["keys"] if key.get("kty") in _ASYMMETRIC and "d" not in key and key.get("use") != "enc"
    ]
    return KeySet.import_key_set({"keys": usable})


def _claim(claims: Mapping[str, Any], path: str) -> Any:
    if path in claims:  # issuers use URLs as names, which have dots
        return claims[path]
    found: Any = claims
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _not_valid() -> Unauthenticated:
    return Unauthenticated("the API key is not valid")
