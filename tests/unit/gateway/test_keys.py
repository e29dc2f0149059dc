"""Keys: their text, what may be asked for, who owns them, and that the text is told once."""

import re
from base64 import urlsafe_b64decode
from typing import Any

import pytest

from roundhouse.audit_trail import BusAuditTrail
from roundhouse.catalogue.records import Budget, Catalogue, ScopeLimits, Tenant
from roundhouse.errors import InvalidInput, NotFound, Unauthenticated, Unavailable
from roundhouse.vocabulary import KeyId, TenantId
from services.gateway.domain import keys
from services.gateway.domain.keys import ADMIN, INFERENCE, OPERATORS, USAGE_READ
from services.gateway.operations.keys import LIFETIME_MAX_S, OVERLAP_MAX_S, KeyOperations, KeyWish
from tests.fakes.admission import InMemoryKeys
from tests.fakes.catalogue import FixedCatalogue
from tests.fakes.clock import ManualClock
from tests.fakes.event_bus import FakeBus

ACME, ROOT = TenantId("acme"), KeyId("bootstrap")


class Desk:
    """Key operations over fakes; chance counts upwards."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.registry = InMemoryKeys(self.clock)
        self.bus = FakeBus()
        self._next = 0
        view = FixedCatalogue(Catalogue(generation=1, tenants={ACME: Tenant(name=ACME)}))
        audit = BusAuditTrail(self.bus, self.clock)
        self.operations = KeyOperations(self.registry, view, audit, self.clock, self._chance)

    def _chance(self, count: int) -> bytes:
        self._next += 1
        return self._next.to_bytes(count, "big")


def test_a_key_text_has_the_format_and_all_its_chance() -> None:
    """`rh-` and 43 characters that hold 32 bytes."""
    secret = bytes(range(32))
    text = keys.key_text(secret)
    assert re.fullmatch(r"rh-[A-Za-z0-9_-]{43}", text)
    assert urlsafe_b64decode(text[3:] + "=") == secret
    assert keys.well_formed(text)


def test_a_hash_takes_any_text() -> None:
    """Callers send anything, half a surrogate too."""
    assert len(keys.key_hash("\ud800")) == 64


async def test_a_made_key_works_and_is_audited_without_its_text() -> None:
    """Invariant 16: the audit event names the key by its id; the text is in the answer alone."""
    desk = Desk()
    made = await desk.operations.create(KeyWish("acme", (INFERENCE, USAGE_READ), 60, "ci"), actor=ROOT)
    assert made.record.expires_ms == desk.clock.now_ms() + 60_000
    caller = await desk.registry.identify(made.text)
    assert (caller.tenant_id, caller.scopes) == (ACME, frozenset({INFERENCE, USAGE_READ}))
    published = repr(desk.bus.durable)
    assert made.record.key_id in published
    assert made.text not in published
    assert made.text not in repr(made.record)
    desk.clock.advance(60_000)
    assert desk.operations.state_of(made.record) == "expired"


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        (KeyWish("acme", ()), "scopes"),
        (KeyWish("acme", ("everything",)), "scopes"),
        (KeyWish("acme", (ADMIN,)), "scopes"),
        (KeyWish("", (ADMIN, INFERENCE)), "scopes"),
        (KeyWish("acme", expires_in_s=0), "expires_in_s"),
        (KeyWish("acme", expires_in_s=-5), "expires_in_s"),
        (KeyWish("acme", expires_in_s=LIFETIME_MAX_S + 1), "expires_in_s"),
        (KeyWish("acme", label="x" * 101), "label"),
        (KeyWish("acme", label="line\nend"), "label"),
    ],
)
async def test_wrong_wishes_are_refused(wish: KeyWish, param: str) -> None:
    """Invariant 15: the parameter is named and no key is made."""
    desk = Desk()
    with pytest.raises(InvalidInput) as refused:
        await desk.operations.create(wish, actor=ROOT)
    assert refused.value.param == param
    assert await desk.operations.all(None) == []


@pytest.mark.parametrize("tenant", ["", "other", "acme}", OPERATORS])
async def test_only_declared_tenants_get_keys(tenant: str) -> None:
    """A key of nobody could never be seen in a list again."""
    with pytest.raises(NotFound):
        await Desk().operations.create(KeyWish(tenant), actor=ROOT)


async def test_admin_keys_belong_to_the_operators() -> None:
    """They are listed with them."""
    desk = Desk()
    made = await desk.operations.create(KeyWish(scopes=(ADMIN,)), actor=ROOT)
    assert made.record.tenant_id == OPERATORS
    assert [record.key_id for record in await desk.operations.all(OPERATORS)] == [made.record.key_id]


async def test_lists_are_of_one_tenant_or_of_all() -> None:
    """An unknown tenant is told, not shown as one without keys."""
    desk = Desk()
    made = await desk.operations.create(KeyWish("acme"), actor=ROOT)
    assert await desk.operations.all("acme") == await desk.operations.all(None) == [made.record]
    with pytest.raises(NotFound):
        await desk.operations.all("other")


async def test_revoking_works_while_the_bus_is_away() -> None:
    """B06: the bus is not needed to end a key, and its absence is no reason to report a failure."""
    desk = Desk()
    made = await desk.operations.create(KeyWish("acme"), actor=ROOT)
    desk.bus.connected = False
    ended = await desk.operations.revoke(made.record.key_id, actor=ROOT)
    assert desk.operations.state_of(ended) == "revoked"
    assert not desk.registry.is_alive(ACME, made.record.key_hash)


async def test_what_cannot_be_revoked_is_told() -> None:
    """An unknown key, the bootstrap key, and any key while the store is away."""
    desk = Desk()
    refusals: list[tuple[str, type[Exception]]] = [("key-none", NotFound), ("bootstrap", InvalidInput)]
    for key_id, kind in refusals:
        with pytest.raises(kind):
            await desk.operations.revoke(KeyId(key_id), actor=ROOT)
    desk.registry.away = True
    call: Any = desk.operations.revoke(KeyId("key-none"), actor=ROOT)
    with pytest.raises(Unavailable):
        await call


async def test_a_rotated_key_and_its_successor_work_side_by_side_for_the_overlap() -> None:
    """The successor has scopes, label, limits and lifetime; the old one ends after 60 s."""
    desk = Desk()
    own = ScopeLimits(requests_per_minute=5)
    old = await desk.operations.create(KeyWish("acme", (INFERENCE,), 3_600, "ci", own), actor=ROOT)
    desk.clock.advance(1_000)
    rotation = await desk.operations.rotate(old.record.key_id, overlap_s=60, actor=ROOT)
    made = rotation.new.record
    assert (made.tenant_id, made.label, made.limits) == (ACME, "ci", own)
    assert made.scopes == {INFERENCE}
    assert made.replaces == old.record.key_id
    assert made.expires_ms - made.created_ms == 3_600_000
    desk.clock.advance(59_999)
    for text in (old.text, rotation.new.text):
        assert (await desk.registry.identify(text)).tenant_id == ACME
    desk.clock.advance(1)
    with pytest.raises(Unauthenticated):
        await desk.registry.identify(old.text)
    assert (await desk.registry.identify(rotation.new.text)).key_id == made.key_id


async def test_rotating_never_lets_a_key_live_longer() -> None:
    """A key with 10 s left and an overlap of a day ends in 10 s."""
    desk = Desk()
    old = await desk.operations.create(KeyWish("acme", (INFERENCE,), 10), actor=ROOT)
    rotation = await desk.operations.rotate(old.record.key_id, overlap_s=86_400, actor=ROOT)
    assert rotation.old.expires_ms == old.record.expires_ms


async def test_what_has_ended_is_not_rotated() -> None:
    """Revoked, expired, the bootstrap key, an endless overlap, and what there is not."""
    desk = Desk()
    gone = await desk.operations.create(KeyWish("acme", (INFERENCE,)), actor=ROOT)
    await desk.operations.revoke(gone.record.key_id, actor=ROOT)
    short = await desk.operations.create(KeyWish("acme", (INFERENCE,), 1), actor=ROOT)
    desk.clock.advance(1_000)
    for key_id in (gone.record.key_id, short.record.key_id, ROOT):
        with pytest.raises(InvalidInput):
            await desk.operations.rotate(key_id, overlap_s=60, actor=ROOT)
    good = await desk.operations.create(KeyWish("acme", (INFERENCE,)), actor=ROOT)
    for overlap_s in (-1, OVERLAP_MAX_S + 1):
        with pytest.raises(InvalidInput):
            await desk.operations.rotate(good.record.key_id, overlap_s=overlap_s, actor=ROOT)
    with pytest.raises(NotFound):
        await desk.operations.rotate(KeyId("key-none"), overlap_s=60, actor=ROOT)


async def test_successors_go_on_with_the_budget_of_the_first_key() -> None:
    """Rotated twice: both are of the family of the first, so rotating gives nobody more money."""
    desk = Desk()
    own = ScopeLimits(budget=Budget(amount="5"), queued_requests=3)
    first = await desk.operations.create(KeyWish("acme", limits=own), actor=ROOT)
    assert first.record.family is None
    second = (await desk.operations.rotate(first.record.key_id, overlap_s=60, actor=ROOT)).new.record
    third = (await desk.operations.rotate(second.key_id, overlap_s=60, actor=ROOT)).new
    assert (second.family, third.record.family) == (first.record.key_id, first.record.key_id)
    assert (await desk.registry.identify(third.text)).family == first.record.key_id


async def test_a_wrong_budget_of_a_key_is_refused() -> None:
    """Amounts are decimals, currencies three letters, periods a day or a month."""
    desk = Desk()
    for budget, param in (
        (Budget(amount="-1"), "amount"),
        (Budget(amount="much"), "amount"),
        (Budget(amount="1", currency="dollars"), "currency"),
        (Budget(amount="1", period="year"), "period"),
    ):
        with pytest.raises(InvalidInput) as refused:
            await desk.operations.create(KeyWish("acme", limits=ScopeLimits(budget=budget)), actor=ROOT)
        assert refused.value.param == f"limits.budget.{param}"


async def test_a_wrong_limit_of_a_key_is_refused() -> None:
    """Limits keep the arithmetic exact: 0 to a thousand million."""
    desk = Desk()
    for value in (-1, 10**9 + 1):
        with pytest.raises(InvalidInput) as refused:
            await desk.operations.create(KeyWish("acme", limits=ScopeLimits(tokens_per_minute=value)), actor=ROOT)
        assert refused.value.param == "limits.tokens_per_minute"
