"""Applies a declaration: checks all of it, reads its files, and makes it the next generation in one step.

1. Parse and check; 2. digests and sizes, in threads; 3. compare with what is stored; 4. compare-and-set generation + 1;
5. announce; 6. audit. Until step 4 nothing has changed, and step 4 is atomic: a wrong file, a lost store or a cancelled
call leaves the old generation (case B44). Steps 5 and 6 may fail without harm: readers poll, and the log has it.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
from prometheus_client import Counter

from roundhouse import subjects, telemetry
from roundhouse.catalogue.assembly import FileReading, assemble
from roundhouse.catalogue.changes import Change, changes_between
from roundhouse.catalogue.declaration import parse
from roundhouse.catalogue.problems import DeclarationRefused, Place, Problem
from roundhouse.catalogue.records import EMPTY, Catalogue, Pin
from roundhouse.catalogue.store import CatalogueView, GenerationStore
from roundhouse.catalogue.yaml_document import BYTES_MAX
from roundhouse.errors import Conflict, NotFound, RoundhouseError, Unavailable
from roundhouse.event_bus import EventBus
from roundhouse.vocabulary import KeyId, ModelName
from roundhouse.wire.v1 import events_pb2
from services.gateway.operations.admin_ports import AuditTrail

log = structlog.get_logger(__name__)

FAILURES = Counter(
    "roundhouse_catalogue_apply_failures",
    "Declarations that were not applied; the generation stayed as it was.",
    registry=telemetry.REGISTRY,
)


@dataclass(frozen=True, slots=True)
class Declared:
    """A declaration as somebody hands it in."""

    text: str
    file_name: str  # for the places of problems
    base_dir: Path  # what relative paths are relative to


@dataclass(frozen=True, slots=True)
class Applied:
    """What came of it. `generation` is the one in force, or with `dry_run` the one it would have become."""

    generation: int
    changes: tuple[Change, ...]
    dry_run: bool = False

    @property
    def unchanged(self) -> bool:
        """Whether everything was in force already."""
        return not self.changes


class CatalogueApplication:
    """Applies one declaration at a time in this process; between processes the store decides."""

    def __init__(
        self,
        store: GenerationStore,
        catalogue: CatalogueView,
        bus: EventBus,
        audit: AuditTrail,
        reading: FileReading,
    ) -> None:
        self._store = store
        self._catalogue = catalogue
        self._bus = bus
        self._audit = audit
        self._reading = reading
        self._one_at_a_time = asyncio.Lock()

    async def apply(self, declared: Declared, *, actor: KeyId, dry_run: bool = False) -> Applied:
        """Apply, or with `dry_run` only say what would change. Idempotent: the same content makes no new generation.

        Raises DeclarationRefused (all problems), Conflict (somebody else applied something else meanwhile),
        Unavailable. Cancelled before the write it changes nothing; after it readers follow by themselves."""
        async with self._one_at_a_time:
            try:
                applied = await self._apply(declared, dry_run=dry_run)
            except RoundhouseError as error:
                FAILURES.inc()
                log.warning("catalogue_refused", file=declared.file_name, reason=error.message)
                raise
        if not applied.unchanged and not dry_run:
            await self._announce(applied, actor)
        return applied

    async def pin(self, name: str, pin: Pin | None, *, actor: KeyId) -> Applied:
        """Pin a model whatever the declaration says, or (None) take that back. Idempotent.

        Raises NotFound, Conflict (the declaration itself pins it, or somebody changed the catalogue meanwhile),
        Unavailable."""
        async with self._one_at_a_time:
            stored = await self._store.get()
            before = EMPTY if stored is None else stored.catalogue
            model = before.models.get(ModelName(name))
            if model is None:
                raise NotFound(f"there is no model `{name}`", code="model_not_found")
            pins = {each: known for each, known in before.pins.items() if each != name}
            if pin is not None:
                pins[model.name] = pin
            elif model.pinned or model.min_replicas:
                raise Conflict("the declaration keeps it there: change its `residency` and apply")
            after = msgspec.structs.replace(before, pins=pins, generation=before.generation + 1)
            applied = Applied(after.generation, changes_between(before, after))
            if applied.unchanged:
                return Applied(before.generation, ())
            await self._store.put(after, expected_generation=before.generation)
        await self._announce(applied, actor)
        details = {"min_replicas": str(pin.min_replicas)} if pin is not None else {}
        await self._audit.record("pin" if pin is not None else "unpin", actor=actor, subject=name, details=details)
        return applied

    async def _apply(self, declared: Declared, *, dry_run: bool) -> Applied:
        wanted = await asyncio.to_thread(self._read, declared)
        applied, before = await self._compare(wanted, dry_run=dry_run)
        if applied.unchanged or dry_run:
            return applied
        try:
            await self._put(wanted, applied, before)
        except Conflict:
            # Gateways that start together apply the same file; one of them is first, and that is no conflict.
            again, _ = await self._compare(wanted, dry_run=False)
            if not again.unchanged:
                raise
        return applied

    def _read(self, declared: Declared) -> Catalogue:
        return assemble(parse(declared.text, declared.file_name, declared.base_dir), self._reading)

    async def _compare(self, wanted: Catalogue, *, dry_run: bool) -> tuple[Applied, Catalogue]:
        stored = await self._store.get()
        before = EMPTY if stored is None else stored.catalogue
        wanted = _with_pins(wanted, before)
        changes = changes_between(before, wanted)
        return Applied(before.generation + bool(changes), changes, dry_run), before

    async def _put(self, wanted: Catalogue, applied: Applied, before: Catalogue) -> None:
        catalogue = msgspec.structs.replace(_with_pins(wanted, before), generation=applied.generation)
        await self._store.put(catalogue, expected_generation=before.generation)

    async def _announce(self, applied: Applied, actor: KeyId) -> None:
        message = events_pb2.CatalogueChanged(generation=applied.generation)
        try:
            await self._catalogue.refresh()  # who applied may call the new model here at once
            await self._bus.publish(subjects.CATALOGUE_CHANGED, message.SerializeToString())
        except Unavailable as error:
            log.warning("catalogue_change_not_announced", reason=error.message)
        counts = _counts(applied)
        log.info("catalogue_applied", generation=applied.generation, **counts)
        await self._audit.record("apply", actor=actor, subject=f"generation {applied.generation}", details=counts)


def _with_pins(wanted: Catalogue, before: Catalogue) -> Catalogue:
    """Pins stay as long as there is the model."""
    pins = {name: pin for name, pin in before.pins.items() if name in wanted.models}
    return msgspec.structs.replace(wanted, pins=pins)


def read_declared(path: Path) -> Declared:
    """A declaration from a file. Blocking. Raises DeclarationRefused if it cannot be read."""
    try:
        if path.stat().st_size > BYTES_MAX:
            raise DeclarationRefused([Problem(str(path), Place(), f"the file is larger than {BYTES_MAX} bytes")])
        return Declared(path.read_text("utf-8"), str(path), path.absolute().parent)
    except OSError as error:
        raise DeclarationRefused([Problem(str(path), Place(), f"cannot be read: {error.strerror}")]) from error
    except UnicodeDecodeError as error:
        raise DeclarationRefused([Problem(str(path), Place(), "is not UTF-8 text")]) from error


def _counts(applied: Applied) -> Mapping[str, str]:
    actions = [change.action for change in applied.changes]
    return {action: str(actions.count(action)) for action in ("added", "changed", "removed")}
