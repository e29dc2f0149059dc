"""Tokens of an issuer: what is believed, what is not, and how often the issuer is asked. No network."""

import asyncio
import base64
import hmac
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from joserfc import jwt
from joserfc.jwk import ECKey, KeySet, OctKey, RSAKey

from roundhouse.errors import Unauthenticated, Unavailable
from services.gateway.adapters.identity_tokens import (
    FETCH_MS_MIN,
    REFRESH_MS,
    TOKEN_CHARACTERS_MAX,
    IdentityTokens,
    Issuer,
    KeysAndTokens,
)
from services.gateway.domain.keys import OPERATORS
from tests.fakes.admission import InMemoryKeys
from tests.fakes.clock import ManualClock

NAME, AUDIENCE = "https://issuer.example", "roundhouse"
RSA = RSAKey.generate_key(2048, {"kid": "rsa-1", "use": "sig"})
EC = ECKey.generate_key("P-256", {"kid": "ec-1", "use": "sig"})
OTHER = ECKey.generate_key("P-256", {"kid": "ec-2", "use": "sig"})


class Desk:
    """An issuer over a transport of its own, and what is believed of it."""

    def __init__(self, **changes: Any) -> None:
        self.clock = ManualClock()
        self.keys: list[Any] = [RSA, EC]
        self.asked = 0
        self.status = 200
        self.body: bytes | None = None
        client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        self.tokens = IdentityTokens(Issuer(**{"name": NAME, "audience": AUDIENCE, **changes}), client, self.clock)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/openid-configuration"):
            return httpx.Response(200, json={"issuer": NAME, "jwks_uri": f"{NAME}/keys"})
        self.asked += 1
        content = self.body or json.dumps(KeySet(self.keys).as_dict(private=False)).encode()
        return httpx.Response(self.status, content=content)

    def token(self, key: Any = EC, alg: str = "ES256", header: dict[str, Any] | None = None, **claims: Any) -> str:
        """A good token, changed; a claim of None is left out."""
        now_s = self.clock.now_ms() // 1000
        good = {
            "iss": NAME,
            "aud": [AUDIENCE, "other"],
            "sub": "alice",
            "exp": now_s + 300,
            "tenant": "acme",
            "scope": "inference openid",
        }
        told = {name: value for name, value in {**good, **claims}.items() if value is not None}
        return jwt.encode({"alg": alg, "kid": key.kid, **(header or {})}, told, key, algorithms=[alg])


def base64url(data: bytes) -> str:
    """As JWTs write bytes."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


@pytest.mark.parametrize(("key", "alg"), [(EC, "ES256"), (RSA, "RS256")])
async def test_a_token_names_its_tenant_scopes_and_end(key: Any, alg: str) -> None:
    """Invariant 16: the tenant is the claim; words that are no scopes of ours are dropped; the end has the leeway."""
    desk = Desk()
    caller = await desk.tokens.identify(desk.token(key, alg))
    assert (str(caller.tenant_id), set(caller.scopes), caller.key_hash) == ("acme", {"inference"}, "")
    assert caller.expires_ms == desk.clock.now_ms() // 1000 * 1000 + 330_000
    assert caller.key_id.startswith("jwt-")
    assert "alice" not in repr(caller)


@pytest.mark.parametrize(
    "claims",
    [
        {"iss": "https://evil.example"},
        {"iss": None},
        {"aud": "other"},
        {"aud": None},
        {"exp": 1},
        {"exp": None},
        {"exp": "soon"},
        {"nbf": 10**11},
        {"sub": None},
        {"tenant": None},
        {"tenant": 5},
        {"tenant": "a}:keys"},
        {"tenant": "../x"},
        {"tenant": "acme\n"},
        {"scope": None},
        {"scope": "openid"},
        {"scope": "admin"},
    ],
)
async def test_what_does_not_say_enough_is_refused(claims: dict[str, Any]) -> None:
    """One message for all of it; `admin` is no word of an issuer unless settings say so."""
    desk = Desk()
    with pytest.raises(Unauthenticated) as refused:
        await desk.tokens.identify(desk.token(**claims))
    assert refused.value.message == "the API key is not valid"


async def test_clocks_may_differ_by_the_leeway() -> None:
    """30 s after its end, and 30 s before its beginning, a token is still taken; a second more and it is not."""
    desk = Desk()
    now_s = desk.clock.now_ms() // 1000
    await desk.tokens.identify(desk.token(exp=now_s - 29))
    await desk.tokens.identify(desk.token(nbf=now_s + 30))
    late: list[dict[str, Any]] = [{"exp": now_s - 30}, {"nbf": now_s + 31}]
    for claims in late:
        with pytest.raises(Unauthenticated):
            await desk.tokens.identify(desk.token(**claims))


async def test_no_signature_and_a_public_key_as_secret_are_refused() -> None:
    """RFC 8725, 2.1 and 3.1: `none`, HS256 over the RSA key's text, and an algorithm that was not set."""
    desk = Desk()
    good = desk.token(RSA, "RS256")
    header, payload, signature = good.split(".")
    none = "eyJhbGciOiJub25lIn0"  # {"alg":"none"}
    signed = base64url(b'{"alg":"HS256","kid":"rsa-1"}') + f".{payload}"
    confused = f"{signed}.{base64url(hmac.digest(RSA.as_pem(private=False), signed.encode(), 'sha256'))}"
    for text in (
        f"{none}.{payload}.",
        f"{none}.{payload}.{signature}",
        confused,
        desk.token(RSA, "RS512"),
        f"{header}.{payload}.{signature[:-4]}AAAA",
        f"{header}.{payload}.",
    ):
        with pytest.raises(Unauthenticated):
            await desk.tokens.identify(text)


async def test_a_shared_secret_in_the_key_set_is_not_used() -> None:
    """An issuer that publishes an oct key by mistake opens no door."""
    desk = Desk()
    secret = OctKey.generate_key(256, {"kid": "oct-1"})
    desk.body = json.dumps({"keys": [secret.as_dict(private=True), EC.as_dict(private=False)]}).encode()
    await desk.tokens.identify(desk.token())
    with pytest.raises(Unauthenticated):
        await desk.tokens.identify(desk.token(secret, "HS256"))


async def test_a_rotated_key_is_found_and_made_up_ones_cost_the_issuer_nothing() -> None:
    """The set is asked for once; for a new key id once more; for 100 unknown ids in 10 s not again."""
    desk = Desk()
    for _ in range(10):
        await desk.tokens.identify(desk.token())
    assert desk.asked == 1
    desk.clock.advance(FETCH_MS_MIN)
    desk.keys = [RSA, OTHER]
    await desk.tokens.identify(desk.token(OTHER))
    assert desk.asked == 2
    with pytest.raises(Unauthenticated):  # the old key is gone with the old set
        await desk.tokens.identify(desk.token(EC))
    for number in range(100):
        stranger = desk.token(OTHER, header={"kid": f"k{number}"})
        with pytest.raises(Unauthenticated):
            await desk.tokens.identify(stranger)
    assert desk.asked == 2


async def test_an_issuer_that_is_away_stops_only_who_needs_it() -> None:
    """Without any key set: Unavailable, never a yes. With one: it holds on, also past its time."""
    desk = Desk()
    desk.status = 500
    with pytest.raises(Unavailable):
        await desk.tokens.identify(desk.token())
    desk.clock.advance(FETCH_MS_MIN)
    desk.status = 200
    await desk.tokens.identify(desk.token())
    desk.status = 500
    desk.clock.advance(REFRESH_MS + 1)
    await desk.tokens.identify(desk.token())
    assert desk.asked == 3


async def test_an_issuer_may_answer_anything() -> None:
    """No JSON, another shape, no end: what is kept is what was good."""
    desk = Desk()
    for body in (b"<html>", b"[]", b'{"keys": 5}', b'{"keys": [5]}', b'{"keys": []}', b" " * 300_000):
        desk.body = body
        with pytest.raises(Unavailable):
            await desk.tokens.identify(desk.token())
        desk.clock.advance(FETCH_MS_MIN)
    desk.body = None
    await desk.tokens.identify(desk.token())


async def test_claims_go_where_settings_say() -> None:
    """Nested claims, names with dots, lists of words, and an admin who belongs to no tenant."""
    scopes = {"models.use": "inference", "ops": "admin"}
    desk = Desk(tenant_claim="org.name", scope_claim="https://x.example/roles", scopes=scopes)
    claim: dict[str, Any] = {"https://x.example/roles": ["models.use", 5, "inference"], "org": {"name": "globex"}}
    caller = await desk.tokens.identify(desk.token(tenant="acme", **claim))
    assert (str(caller.tenant_id), set(caller.scopes)) == ("globex", {"inference"})
    rise: dict[str, Any] = {"https://x.example/roles": ["ops", "models.use"]}
    boss = await desk.tokens.identify(desk.token(**rise))
    assert (boss.tenant_id, boss.scopes) == (OPERATORS, frozenset({"admin"}))


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(st.characters(codec="ascii"), max_size=200) | st.from_regex(r"[\w-]+\.[\w-]*\.[\w-]*", fullmatch=True)
)
def test_garbage_is_refused_and_nothing_else(text: str) -> None:
    """Whatever a stranger sends, the answer is one of ours."""

    async def tried() -> None:
        desk = Desk()
        with pytest.raises(Unauthenticated):
            await KeysAndTokens(InMemoryKeys(desk.clock), desk.tokens).identify(text)

    asyncio.run(tried())


async def test_an_endless_token_is_no_token() -> None:
    """It goes the way of keys, which are refused by their form, and costs no signature check."""
    desk = Desk()
    endless = "a." + "b" * TOKEN_CHARACTERS_MAX + ".c"
    with pytest.raises(Unauthenticated):
        await KeysAndTokens(InMemoryKeys(desk.clock), desk.tokens).identify(endless)
    assert desk.asked == 0
