"""Applying a declaration: all of it or nothing, told to everybody, and never twice."""

import asyncio
from pathlib import Path

import pytest

from roundhouse import subjects, telemetry
from roundhouse.audit_trail import BusAuditTrail
from roundhouse.catalogue.assembly import FileReading
from roundhouse.catalogue.digests import DigestCache
from roundhouse.catalogue.problems import DeclarationRefused
from roundhouse.catalogue.records import Catalogue, Pin
from roundhouse.errors import Conflict, NotFound, Unavailable
from roundhouse.event_bus import Message
from roundhouse.vocabulary import KeyId, ModelName
from roundhouse.wire.v1 import events_pb2
from services.gateway.operations.apply import CatalogueApplication, Declared, read_declared
from tests.fakes.catalogue import FixedCatalogue, InMemoryCatalogueStore
from tests.fakes.clock import ManualClock
from tests.fakes.event_bus import FakeBus
from tests.unit.catalogue.files import GOOD, write_models

ROOT = KeyId("bootstrap")


class Bench:
    """An application of declarations over fakes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = InMemoryCatalogueStore()
        self.bus = FakeBus()
        audit = BusAuditTrail(self.bus, ManualClock())
        self.operation = CatalogueApplication(self.store, FixedCatalogue(), self.bus, audit, FileReading(DigestCache()))

    def declared(self, text: str = GOOD) -> Declared:
        """A text beside the models."""
        return Declared(text, "c.yaml", self.root)

    async def generation(self) -> int:
        """What is stored."""
        stored = await self.store.get()
        return 0 if stored is None else stored.catalogue.generation

    def audited(self) -> list[events_pb2.AuditEvent]:
        """Every audit event so far."""
        return [events_pb2.AuditEvent.FromString(data) for _, data in self.bus.durable.values()]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """With every file that the right declaration names."""
    return Bench(write_models(tmp_path))


def failures() -> float:
    """Declarations that this process refused."""
    value = telemetry.REGISTRY.get_sample_value("roundhouse_catalogue_apply_failures_total")
    assert value is not None
    return value


async def test_a_right_declaration_becomes_the_next_generation(bench: Bench) -> None:
    """B44: stored, announced, audited; the answer says what changed."""
    announced: list[int] = []

    async def hear(message: Message) -> None:
        announced.append(events_pb2.CatalogueChanged.FromString(message.data).generation)

    await bench.bus.subscribe(subjects.CATALOGUE_CHANGED, hear)
    applied = await bench.operation.apply(bench.declared(), actor=ROOT)
    assert (applied.generation, applied.unchanged, await bench.generation()) == (1, False, 1)
    named = [(change.action, change.kind, change.name) for change in applied.changes]
    assert named == [
        ("added", "tenant", "acme"),
        ("added", "tenant", "globex"),
        ("added", "model", "chat"),
        ("added", "model", "tagger"),
        ("added", "adapter", "chat-acme"),
    ]
    (event,) = bench.audited()
    assert (event.what, event.actor, event.details["added"]) == ("apply", "bootstrap", "5")
    await asyncio.sleep(0)  # the fake bus delivers at the next turn of the loop
    assert announced == [1]


async def test_the_same_content_makes_no_new_generation(bench: Bench) -> None:
    """Applying again, in other words, changes nothing and announces nothing."""
    await bench.operation.apply(bench.declared(), actor=ROOT)
    again = await bench.operation.apply(bench.declared("# a comment\n" + GOOD), actor=ROOT)
    assert (again.generation, again.unchanged, await bench.generation()) == (1, True, 1)
    assert len(bench.audited()) == 1


async def test_changed_weights_are_a_change(bench: Bench) -> None:
    """B26: the same text over other files is another version."""
    await bench.operation.apply(bench.declared(), actor=ROOT)
    (bench.root / "models" / "tagger.onnx").write_bytes(b"new")
    applied = await bench.operation.apply(bench.declared(), actor=ROOT)
    assert applied.generation == 2
    assert [(change.name, change.fields) for change in applied.changes] == [("tagger", ("digest", "files"))]


async def test_a_dry_run_changes_nothing(bench: Bench) -> None:
    """It says what would be."""
    applied = await bench.operation.apply(bench.declared(), actor=ROOT, dry_run=True)
    assert (applied.generation, len(applied.changes), applied.dry_run) == (1, 5, True)
    assert (await bench.generation(), bench.audited()) == (0, [])


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("weight: 2", "weight: [2"),
        ("limits: {requests_per_minute: 600, tokens_per_minute: 200000}", "limits: 5"),
        ("path: models/chat", "path: models/gone"),
        ("name: tagger", "name: chat"),
        ("requests_per_minute: 600", "requests_per_minute: -1"),
        ("weight: 2", "wieght: 2"),
    ],
)
async def test_a_broken_declaration_leaves_the_generation(bench: Bench, right: str, wrong: str) -> None:
    """B44: reload: generation unchanged, failure counter +1, the place named; the next good one is +1."""
    await bench.operation.apply(bench.declared(), actor=ROOT)
    before, failed = await bench.store.get(), failures()
    with pytest.raises(DeclarationRefused) as refused:
        await bench.operation.apply(bench.declared(GOOD.replace(right, wrong, 1)), actor=ROOT)
    assert refused.value.problems[0].place.line > 1
    assert await bench.store.get() == before
    assert failures() == failed + 1
    good = await bench.operation.apply(bench.declared(GOOD.replace("weight: 2", "weight: 3")), actor=ROOT)
    assert good.generation == 2


async def test_a_broken_declaration_makes_no_first_generation(bench: Bench) -> None:
    """B44: fresh start: nothing is stored, so nothing runs on defaults."""
    with pytest.raises(DeclarationRefused):
        await bench.operation.apply(bench.declared("models: 5"), actor=ROOT)
    assert await bench.store.get() is None


async def test_a_lost_bus_does_not_undo_what_was_applied(bench: Bench) -> None:
    """Invariant 18: readers poll."""
    bench.bus.connected = False
    assert (await bench.operation.apply(bench.declared(), actor=ROOT)).generation == 1
    assert await bench.generation() == 1


async def test_a_lost_store_is_a_failure_that_changes_nothing(bench: Bench) -> None:
    """B44: counted like any other failure."""
    failed = failures()
    bench.store.away = True
    with pytest.raises(Unavailable):
        await bench.operation.apply(bench.declared(), actor=ROOT)
    assert failures() == failed + 1


class BeatenStore(InMemoryCatalogueStore):
    """A store into which somebody else puts a generation just before the first `put`."""

    def __init__(self, other: Catalogue) -> None:
        super().__init__()
        self._other: Catalogue | None = other

    async def put(self, catalogue: Catalogue, *, expected_generation: int) -> None:
        """See `GenerationStore.put`."""
        if (other := self._other) is not None:
            self._other = None
            await super().put(other, expected_generation=0)
        await super().put(catalogue, expected_generation=expected_generation)


def racing(bench: Bench, other: Catalogue) -> CatalogueApplication:
    """An application that is beaten by another process."""
    audit = BusAuditTrail(bench.bus, ManualClock())
    return CatalogueApplication(BeatenStore(other), FixedCatalogue(), bench.bus, audit, FileReading(DigestCache()))


async def test_processes_that_start_together_with_one_file_agree(bench: Bench) -> None:
    """The second to write finds its own content in force, and that is success."""
    await bench.operation.apply(bench.declared(), actor=ROOT)
    stored = await bench.store.get()
    assert stored is not None
    applied = await racing(bench, stored.catalogue).apply(bench.declared(), actor=ROOT)
    assert applied.generation == 1


async def test_of_two_operators_one_is_told(bench: Bench) -> None:
    """B44: who did not see the other's change does not overwrite it unknowingly."""
    with pytest.raises(Conflict):
        await racing(bench, Catalogue(generation=1)).apply(bench.declared(), actor=ROOT)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    """B44: a missing or foreign file is a refusal with its name, not an empty catalogue."""
    with pytest.raises(DeclarationRefused, match="cannot be read"):
        read_declared(tmp_path / "gone.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(DeclarationRefused, match="not UTF-8"):
        read_declared(tmp_path / "latin.yaml")
    (tmp_path / "good.yaml").write_text(GOOD)
    assert read_declared(tmp_path / "good.yaml").base_dir == tmp_path


async def test_a_pin_holds_over_the_next_declarations(bench: Bench) -> None:
    """`tagger` is pinned by hand (generation 2); another apply keeps that; unpinned, it is as declared."""
    await bench.operation.apply(bench.declared(), actor=ROOT)
    for _ in range(2):  # the second changes nothing
        await bench.operation.pin("tagger", Pin(min_replicas=2), actor=ROOT)
    await bench.operation.apply(bench.declared(GOOD.replace("weight: 2", "weight: 3")), actor=ROOT)
    current = await stored(bench)
    tagger = current.models[ModelName("tagger")]
    assert (current.generation, current.is_pinned(tagger), current.least_replicas(tagger)) == (3, True, 2)
    again = await bench.operation.apply(bench.declared(GOOD.replace("weight: 2", "weight: 3")), actor=ROOT)
    assert again.unchanged
    assert not (await bench.operation.pin("tagger", None, actor=ROOT)).unchanged
    current = await stored(bench)
    assert not current.is_pinned(current.models[ModelName("tagger")])
    assert [event.what for event in bench.audited() if "pin" in event.what] == ["pin", "unpin"]


async def test_what_the_declaration_pins_only_the_declaration_lets_go(bench: Bench) -> None:
    """`chat` is declared as pinned: the refusal says where to change it. An unknown model is not there."""
    await bench.operation.apply(bench.declared(), actor=ROOT)
    with pytest.raises(Conflict, match="change its `residency`"):
        await bench.operation.pin("chat", None, actor=ROOT)
    with pytest.raises(NotFound):
        await bench.operation.pin("none", Pin(), actor=ROOT)


async def test_a_pin_goes_with_its_model(bench: Bench) -> None:
    """A declaration without the model takes the pin away, and says so."""
    await bench.operation.apply(bench.declared(), actor=ROOT)
    await bench.operation.pin("tagger", Pin(), actor=ROOT)
    text = GOOD[: GOOD.index("  - name: tagger")] + GOOD[GOOD.index("adapters:") :]
    applied = await bench.operation.apply(bench.declared(text), actor=ROOT)
    assert {(change.action, change.kind, change.name) for change in applied.changes} == {
        ("removed", "model", "tagger"),
        ("removed", "pin", "tagger"),
    }


async def stored(bench: Bench) -> Catalogue:
    """The generation in force."""
    found = await bench.store.get()
    assert found is not None
    return found.catalogue
