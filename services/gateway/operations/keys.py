"""Makes, lists and revokes keys. The text of a key leaves this process once, in the answer that made it."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from pydantic import ValidationError

from roundhouse.catalogue.records import ScopeLimits
from roundhouse.catalogue.shape import COUNT_MAX, BudgetShape
from roundhouse.catalogue.store import CatalogueView
from roundhouse.clock import Clock
from roundhouse.errors import InvalidInput, NotFound
from roundhouse.vocabulary import KeyId, TenantId
from services.gateway.domain import keys
from services.gateway.domain.keys import KeyRecord
from services.gateway.operations.admin_ports import AuditTrail, KeyRegistry

COUNTED_LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_requests",
    "queued_requests",
    "queued_tokens",
)
LABEL_MAX = 100
OVERLAP_MAX_S = 90 * 24 * 3600  # a guess: longer is not a rotation
LIFETIME_MAX_S = 10 * 365 * 24 * 3600  # ten years: longer is "never", and should be said so


@dataclass(frozen=True, slots=True)
class KeyWish:
    """What a key should be. `expires_in_s` None: it does not expire. An admin key belongs to no tenant."""

    tenant: str = ""
    scopes: tuple[str, ...] = (keys.INFERENCE,)
    expires_in_s: int | None = None
    label: str = ""
    limits: ScopeLimits | None = None


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key just made; `text` is not kept anywhere."""

    record: KeyRecord
    text: str


@dataclass(frozen=True, slots=True)
class Rotation:
    """A key and its successor: the old one works until `old.expires_ms`."""

    new: NewKey
    old: KeyRecord


class KeyOperations:
    """What operators do with keys. `chance` gives that many bytes no one can guess (`secrets.token_bytes`)."""

    def __init__(
        self,
        registry: KeyRegistry,
        catalogue: CatalogueView,
        audit: AuditTrail,
        clock: Clock,
        chance: Callable[[int], bytes],
    ) -> None:
        self._registry = registry
        self._catalogue = catalogue
        self._audit = audit
        self._clock = clock
        self._chance = chance

    async def create(self, wish: KeyWish, *, actor: KeyId) -> NewKey:
        """Make a key that works at once everywhere. Not idempotent. Raises InvalidInput, NotFound, Unavailable."""
        tenant_id = self._owner(wish)
        made = self._made(tenant_id, wish)
        await self._registry.add(made.record)
        details = {"key_id": made.record.key_id, "scopes": " ".join(sorted(made.record.scopes))}
        await self._audit.record("key.create", actor=actor, subject=tenant_id, details=details)
        return made

    async def rotate(self, key_id: KeyId, *, overlap_s: int, actor: KeyId) -> Rotation:
        """Make a successor with the same owner, scopes, label, limits and lifetime; the old key ends after `overlap_s`.

        Not idempotent. Cancelled or failed midway, both keys work and the old one as long as before. Raises NotFound,
        InvalidInput (bootstrap key, an ended key, a wrong overlap), Unavailable."""
        if key_id == keys.BOOTSTRAP_KEY_ID:
            raise InvalidInput("the bootstrap key is a setting: make an admin key instead")
        if not 0 <= overlap_s <= OVERLAP_MAX_S:
            raise InvalidInput(f"must be 0 to {OVERLAP_MAX_S}", param="overlap_s")
        old, now_ms = await self._registry.find(key_id), self._clock.now_ms()
        if old.state(now_ms) != "active":
            raise InvalidInput(f"the key is {old.state(now_ms)}: make a new one")
        lifetime_s = (old.expires_ms - old.created_ms) // 1000 if old.expires_ms else None
        wish = KeyWish(scopes=tuple(sorted(old.scopes)), expires_in_s=lifetime_s, label=old.label, limits=old.limits)
        made = self._made(old.tenant_id, wish, replaces=old)
        await self._registry.add(made.record)
        ending = await self._registry.end_at(key_id, now_ms + overlap_s * 1000, now_ms=now_ms)
        details = {"key_id": key_id, "successor": made.record.key_id, "overlap_s": str(overlap_s)}
        await self._audit.record("key.rotate", actor=actor, subject=old.tenant_id, details=details)
        return Rotation(made, ending)

    def _made(self, tenant_id: TenantId, wish: KeyWish, *, replaces: KeyRecord | None = None) -> NewKey:
        now_ms = self._clock.now_ms()
        text = keys.key_text(self._chance(keys.SECRET_BYTES))
        record = KeyRecord(
            key_id=keys.key_id(self._chance(keys.KEY_ID_BYTES)),
            tenant_id=tenant_id,
            key_hash=keys.key_hash(text),
            scopes=frozenset(wish.scopes),
            label=wish.label,
            created_ms=now_ms,
            expires_ms=0 if wish.expires_in_s is None else now_ms + wish.expires_in_s * 1000,
            limits=wish.limits,
            replaces=replaces.key_id if replaces is not None else None,
            family=(replaces.family or replaces.key_id) if replaces is not None else None,
        )
        return NewKey(record, text)

    async def revoke(self, key_id: KeyId, *, actor: KeyId) -> KeyRecord:
        """End a key at once everywhere. Idempotent. Raises NotFound, InvalidInput (bootstrap key), Unavailable."""
        if key_id == keys.BOOTSTRAP_KEY_ID:
            raise InvalidInput("the bootstrap key is a setting: start the gateways without it")
        record = await self._registry.revoke(key_id, self._clock.now_ms())
        await self._audit.record("key.revoke", actor=actor, subject=record.tenant_id, details={"key_id": key_id})
        return record

    async def all(self, tenant: str | None) -> list[KeyRecord]:
        """Keys of one tenant, or of all tenants and the operators. Raises NotFound (no such tenant), Unavailable."""
        tenants = self._catalogue.current.tenants
        if tenant is not None and tenant not in tenants and tenant != keys.OPERATORS:
            raise NotFound(f"there is no tenant `{tenant}`", code="tenant_not_found")
        wanted = [keys.OPERATORS, *sorted(tenants)] if tenant is None else [TenantId(tenant)]
        return [record for name in wanted for record in await self._registry.of_tenant(name)]

    def state_of(self, record: KeyRecord) -> str:
        """`active`, `expired` or `revoked`, now."""
        return record.state(self._clock.now_ms())

    def _owner(self, wish: KeyWish) -> TenantId:
        _check(wish)
        if keys.ADMIN in wish.scopes:
            return keys.OPERATORS
        if wish.tenant not in self._catalogue.current.tenants:
            raise NotFound(f"there is no tenant `{wish.tenant}`", code="tenant_not_found", param="tenant")
        return TenantId(wish.tenant)


def _check(wish: KeyWish) -> None:
    if not wish.scopes:
        raise InvalidInput("a key needs a scope", param="scopes")
    if unknown := keys.unknown_scopes(wish.scopes):
        raise InvalidInput(
            f"there is no scope `{unknown[0]}`; known are {', '.join(sorted(keys.SCOPES))}", param="scopes"
        )
    if keys.ADMIN in wish.scopes and (wish.tenant or set(wish.scopes) != {keys.ADMIN}):
        raise InvalidInput("an admin key has no other scope and belongs to no tenant", param="scopes")
    if wish.expires_in_s is not None and not 1 <= wish.expires_in_s <= LIFETIME_MAX_S:
        raise InvalidInput(f"must be 1 to {LIFETIME_MAX_S}, or left out for a key without end", param="expires_in_s")
    if wish.limits is not None:
        _check_limits(wish.limits)
    if len(wish.label) > LABEL_MAX or not wish.label.isprintable():
        raise InvalidInput(f"must be at most {LABEL_MAX} printable characters", param="label")


def _check_limits(limits: ScopeLimits) -> None:
    for name in COUNTED_LIMITS:
        value, least = getattr(limits, name), int(name == "queued_tokens")
        if value is not None and not least <= value <= COUNT_MAX:
            raise InvalidInput(f"must be {least} to {COUNT_MAX}", param=f"limits.{name}")
    if limits.budget is not None:
        try:
            BudgetShape.model_validate(msgspec.structs.asdict(limits.budget))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InvalidInput(first["msg"].removeprefix("Value error, "), param=f"limits.budget.{where}") from error
