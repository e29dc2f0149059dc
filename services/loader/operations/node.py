"""All that one loader knows of its node: the instances, the ledgers, and who waits for a change.

One event loop owns it; nothing here awaits between reading and changing. It decides nothing: `domain` does, and
`steps` applies it.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from roundhouse.catalogue.records import ContentFile, Model
from roundhouse.errors import RoundhouseError
from roundhouse.vocabulary import AdapterName, Digest
from services.loader.domain.contents import ContentLedger
from services.loader.domain.device_ledger import DeviceLedger, Site
from services.loader.domain.devices import Device
from services.loader.domain.host_arena import HostArena
from services.loader.domain.instance import Instance
from services.loader.domain.memory_ledger import MemoryLedger
from services.loader.domain.rates import Rates
from services.loader.domain.sites import Need
from services.loader.domain.versions import ModelVersion, triton_model_name
from services.loader.ports import CachedVersion, ModelLibrary


class Changes:
    """Wakes everyone who waits for the next change. Take `next()` before looking, then wait on it: none is missed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def next(self) -> asyncio.Event:
        """The event of the next change."""
        return self._event

    def notify(self) -> None:
        """Something changed."""
        self._event.set()
        self._event = asyncio.Event()


def _maps_nothing(files: Sequence[ContentFile]) -> Collection[str]:
    return ()


@dataclass(frozen=True, slots=True)
class Weights:
    """What is to be brought nearer: a version of a model or of an adapter."""

    digest: Digest
    source: str
    files: tuple[ContentFile, ...] = ()
    mapped: Callable[[Sequence[ContentFile]], Collection[str]] = _maps_nothing
    """Names of the files that the engine reads from host memory."""


def weights_of(model: Model, library: ModelLibrary) -> Weights:
    """The weights of a model's version."""
    return Weights(
        model.digest,
        model.source_path,
        model.files,
        lambda files: {file.name for file in library.mapped_files(model, files)},
    )


@dataclass(slots=True)
class Residence:
    """One version on this node: its life, and what its current load needs to know."""

    instance: Instance
    triton_name: str
    model: Model
    device_bytes: int = 0  # on all of its devices
    site: Site = ()  # the devices it stands on or was promised room on; stays after it left
    alone_for: str = ""  # token of the tenant that has these devices alone; empty = they are shared
    wanted_site: Site = ()  # the devices that its next load is to stand on; empty = whichever are best
    weights_bytes: int = 0
    unload_first: tuple[ModelVersion, ...] = ()
    reason: str = ""  # why the last order was given
    idle: bool = False  # it leaves, and the scheduler has seen that nobody uses it
    promised_to: ModelVersion | None = None  # the load that gets its bytes
    refusal: RoundhouseError | None = None  # why attempt `refused_attempt` was not admitted
    refused_attempt: int = 0
    staging: "asyncio.Future[None] | None" = None  # cancelled by an order that does not want it any more
    measured_bytes: int = 0  # what its processes took after the last load
    had_process: bool = False  # it is known to run as a process of its own, which can be seen from here
    lost_ms: tuple[int, ...] = ()  # when Triton lost it, lately
    unfreed: dict[int, int] = field(default_factory=dict)  # bytes in use beside the other models after its unload
    leaving: bool = False  # it is ready, and about to make room for its new version
    succeeded_by: ModelVersion | None = None  # the version that is to take over, while this one serves

    @property
    def count(self) -> int:
        """How many devices it stands on."""
        return max(1, self.model.tensor_parallel)

    @property
    def need(self) -> Need:
        """What it takes, once its bytes are known; as it was placed, while it is."""
        return Need.of(self.instance.version, self.device_bytes, len(self.site) or self.count, self.alone_for)


@dataclass(frozen=True, slots=True)
class Misfit:
    """An adapter that cannot be used on a base: known, so that it is not fetched and looked at again."""

    adapter: AdapterName
    base: ModelVersion
    reason: str


@dataclass(slots=True)
class AdapterStock:
    """What this node has of adapters beside the account of its disk."""

    host: MemoryLedger[Digest] = field(default_factory=lambda: MemoryLedger(0))
    used_ms: dict[Digest, int] = field(default_factory=dict)
    shelved: set[Digest] = field(default_factory=set)
    """In host memory, whole and not about to leave."""
    kept_until_ms: dict[Digest, int] = field(default_factory=dict)
    """Promised to be where somebody was told that they are."""
    promised_until_ms: dict[Digest, int] = field(default_factory=dict)
    """Promised to be on the node, wherever: instances may still open them, and find them by links."""
    declared: frozenset[Digest] = frozenset()
    """Of the catalogue."""
    misfits: dict[tuple[Digest, Digest, int], Misfit] = field(default_factory=dict)
    """By digest of the adapter and of the base, and the rank that the instance has room for, 0 = the engine's."""


@dataclass(slots=True)
class Node:
    """The aggregate of one node."""

    device: DeviceLedger
    disk: ContentLedger
    host: HostArena = field(default_factory=lambda: HostArena(ContentLedger(0)))
    residences: dict[ModelVersion, Residence] = field(default_factory=dict)
    adapters: AdapterStock = field(default_factory=AdapterStock)
    on_disk: dict[Digest, CachedVersion] = field(default_factory=dict)
    disk_used_ms: dict[Digest, int] = field(default_factory=dict)
    host_used_ms: dict[Digest, int] = field(default_factory=dict)
    rates: Rates = field(default_factory=Rates)
    measured: dict[tuple[ModelVersion, int], int] = field(default_factory=dict)
    """Bytes of versions on so many devices, whose size the catalogue leaves open, as their last load showed."""
    unowned: dict[int, int] = field(default_factory=dict)
    """Bytes in use on each device beside models when it was first looked at; missing = it cannot be told."""
    recycling: str = ""
    """Why its Triton is being ended; empty = it is not."""
    unhealthy_reason: str = "the node's Triton was not asked yet"
    draining: bool = False
    maintenance: str = ""
    """Why an operator took the node out of service; empty = nobody did."""
    loaded_before: dict[str, Model] = field(default_factory=dict)
    """What an earlier process had loaded, by Triton name, until Triton was looked at with a catalogue at hand."""
    dead: set[str] = field(default_factory=set)
    """Triton names whose model process died: the memory is free, whatever Triton's index says, until the next load."""
    changes: Changes = field(default_factory=Changes)
    """States and health: what the mesh is told at once."""
    progress: Changes = field(default_factory=Changes)
    """Also bytes of a running load: for its callers."""

    @property
    def accepting(self) -> bool:
        """Whether new work may come here."""
        return not self.not_accepting_reason

    @property
    def not_accepting_reason(self) -> str:
        """Why no new work may come here; empty = it may."""
        if self.unhealthy_reason:
            return self.unhealthy_reason
        if self.recycling:
            return self.recycling
        if self.maintenance:
            return f"in maintenance: {self.maintenance}"
        return "the loader is stopping" if self.draining else ""

    def settle_in(self, version: ModelVersion, model: Model) -> Residence:
        """The residence of a version, made if it is new; takes the catalogue's latest record of it."""
        home = self.residences.get(version)
        if home is None:
            home = Residence(Instance(version), triton_model_name(version), model)
            self.residences[version] = home
        home.model = model
        return home

    def alone(self) -> dict[ModelVersion, str]:
        """Which versions a tenant has alone on their devices."""
        return {version: home.alone_for for version, home in self.residences.items() if home.alone_for}

    def devices_of(self, home: Residence) -> tuple[Device, ...]:
        """The devices that a version stands on or is loaded to."""
        return tuple(device for device in self.device.devices if device.index in home.site)

    def size_measured(self, home: Residence) -> int:
        """Bytes that a version took when it was loaded last on as many devices; 0 = the catalogue says, or unknown."""
        return 0 if home.model.device_bytes else self.measured.get((home.instance.version, home.count), 0)

    def digests_in_use(self) -> frozenset[Digest]:
        """Weights that are loaded or being loaded, and adapters that an engine was just told of."""
        return (
            frozenset(self.adapters.kept_until_ms)
            | frozenset(self.adapters.promised_until_ms)
            | {version.digest for version, home in self.residences.items() if not home.instance.state.is_at_rest}
        )

    def sharing(self, digest: Digest) -> Iterable[Residence]:
        """Every residence with these weights."""
        return [home for version, home in self.residences.items() if version.digest == digest]

    def promised_to(self, heir: ModelVersion) -> list[Residence]:
        """Whose bytes `heir` gets."""
        return [home for home in self.residences.values() if home.promised_to == heir]

    def set_health(self, unhealthy_reason: str) -> None:
        """Record whether Triton answers; "" = it does."""
        if unhealthy_reason != self.unhealthy_reason:
            self.unhealthy_reason = unhealthy_reason
            self.tell()

    def start_draining(self) -> None:
        """Take no new load from now on. Idempotent."""
        self.draining = True
        self.tell()

    def tell(self) -> None:
        """Wake all who wait for a change of state."""
        self.changes.notify()
        self.progress.notify()
