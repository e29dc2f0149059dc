"""The catalogue as requests see it while a new version takes over: the old one until the new one is ready somewhere.

    catalogue says v2 ── v1 is ready, v2 is not ──► requests go to v1 ── a node says v2 is ready ──► requests go to v2

Access, price and limits are the new record's at once; only what is run stays the old one's. While no node has the old
one ready, requests wait for the new one, as for any cold model. A new version that failed to load
leaves the old one serving until the catalogue changes again (case B19); one that nobody loads is used after
`HOLD_MS` in any case, so that a request asks for it. A gateway that starts in between knows no old record.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from roundhouse.catalogue.records import Catalogue, Model
from roundhouse.catalogue.store import CatalogueView
from roundhouse.clock import Clock
from roundhouse.vocabulary import Digest, ModelName
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2

HOLD_MS = 300_000  # a guess: longer than any load, short against the life of a version
SILENT_MS = 10_000  # as long as a node may say nothing before it counts as gone (case B48)

Listener = Callable[[Catalogue], None]
_FAILED = vocabulary_pb2.INSTANCE_STATE_FAILED
_Version = tuple[ModelName, Digest]


@dataclass(frozen=True, slots=True)
class _Held:
    """A record that goes on being used, and since when."""

    model: Model
    since_ms: int


@dataclass(frozen=True, slots=True)
class _Said:
    """What one node said of the versions it has."""

    at_ms: int
    ready: frozenset[_Version]
    failed: frozenset[_Version]


class ServingVersions:
    """`CatalogueView` over another one: let it `observe` what a `NodeStateFeed` hears."""

    def __init__(self, catalogue: CatalogueView, clock: Clock) -> None:
        self._catalogue = catalogue
        self._clock = clock
        self._nodes: dict[str, _Said] = {}
        self._held: dict[ModelName, _Held] = {}
        self._used: dict[ModelName, Model] = {}  # of these, the ones that are ready somewhere
        self._listeners: list[Listener] = []
        self._declared = catalogue.current
        self._current = catalogue.current
        catalogue.subscribe(self._on_generation)

    @property
    def current(self) -> Catalogue:
        """See `CatalogueView.current`."""
        return self._current

    @property
    def not_ready_reason(self) -> str | None:
        """As the catalogue itself says."""
        return getattr(self._catalogue, "not_ready_reason", None)

    def subscribe(self, listener: Listener) -> None:
        """See `CatalogueView.subscribe`. A version that takes over is a change too."""
        self._listeners.append(listener)
        if self._current.generation:
            listener(self._current)

    async def refresh(self) -> None:
        """See `CatalogueView.refresh`."""
        await self._catalogue.refresh()

    def observe(self, state: loading_pb2.NodeState) -> None:
        """Take in what one node says."""
        ready = vocabulary_pb2.INSTANCE_STATE_READY
        self._nodes[state.node_id] = _Said(
            self._clock.monotonic_ms(),
            _versions(state, ready) if state.accepting else frozenset(),
            _versions(state, _FAILED),
        )
        if self._held:
            self._settle()

    def _on_generation(self, declared: Catalogue) -> None:
        now_ms = self._clock.monotonic_ms()
        for name, model in declared.models.items():
            used, known = self._current.models.get(name), self._declared.models.get(name)
            if used is None or used.digest == model.digest:
                self._held.pop(name, None)
            elif known is None or known.digest != model.digest:
                self._held[name] = _Held(used, now_ms)
        self._declared = declared
        self._settle(tell=True)

    def _settle(self, *, tell: bool = False) -> None:
        """Let go of what will not be needed any more, and make the catalogue that requests see."""
        now_ms = self._clock.monotonic_ms()
        said = [each for each in self._nodes.values() if now_ms - each.at_ms <= SILENT_MS]
        ready = frozenset[_Version]().union(*(each.ready for each in said))
        failed = frozenset[_Version]().union(*(each.failed for each in said))
        for name, held in list(self._held.items()):
            new = self._declared.models.get(name)
            overdue = now_ms - held.since_ms >= HOLD_MS
            if new is None or (name, new.digest) in ready or (overdue and (name, new.digest) not in failed):
                del self._held[name]
        used = {name: held.model for name, held in self._held.items() if (name, held.model.digest) in ready}
        if used == self._used and not tell:
            return
        self._used = used
        under = {name: _under(self._declared.models[name], old) for name, old in used.items()}
        models = {**self._declared.models, **under}
        self._current = msgspec.structs.replace(self._declared, models=models) if under else self._declared
        for listener in self._listeners:
            listener(self._current)


def _versions(state: loading_pb2.NodeState, wanted: "vocabulary_pb2.InstanceState.ValueType") -> frozenset[_Version]:
    """Versions in a state. One that is ready with a reason is about to leave: nothing new is sent there."""
    return frozenset(
        (ModelName(each.version.model), Digest(each.version.digest))
        for each in state.instances
        if each.state == wanted and (wanted == _FAILED or not each.reason)
    )


def _under(new: Model, old: Model) -> Model:
    """What is run is the old one; who may call it and at what price is the new one's."""
    return msgspec.structs.replace(
        old,
        access=new.access,
        price=new.price,
        prices=new.prices,
        pool=new.pool,
        ttft_slo_ms=new.ttft_slo_ms,
        cold_start_slo_ms=new.cold_start_slo_ms,
        fallback=new.fallback,
    )
