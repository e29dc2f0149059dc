"""What the loader's operations need of the world. Adapters implement these; tests pass fakes.

Each fake passes the contract suite of the real adapter.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from roundhouse.catalogue.records import Adapter, ContentFile, Model
from roundhouse.vocabulary import AdapterName, Digest, ModelName, TenantId
from roundhouse.wire.v1 import loading_pb2
from services.loader.device_ports import Setting
from services.loader.domain.versions import ModelVersion


class TritonState(StrEnum):
    """A model's state in Triton's repository index."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"  # its memory is still held
    UNAVAILABLE = "UNAVAILABLE"  # not loaded, or failed to


@dataclass(frozen=True, slots=True)
class LoadPackage:
    """Arguments of Triton's `load_model`: a complete configuration (JSON) and the files of the model."""

    config: str
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlacedModel:
    """Where a loaded model stands, by the package that Triton was given."""

    uuids: tuple[str, ...] = ()  # of its devices
    alone_for: str = ""  # who has them alone


class ModelControl(Protocol):
    """Triton's model control. Every call ends within its `timeout_ms`, also when Triton hangs."""

    async def probe(self, *, timeout_ms: int) -> None:
        """Return if the server lives. Raises Unavailable (nobody listens), DeadlinePassed (it hangs)."""
        ...

    async def index(self, *, timeout_ms: int) -> Mapping[str, TritonState]:
        """Every model that was loaded through this port and is not gone, and some that are. Raises as `probe`."""
        ...

    async def load(self, name: str, package: LoadPackage, *, timeout_ms: int) -> None:
        """Load; ready when it returns. Loading what is loaded changes nothing.

        Raises EngineFailed (the cause, as Triton tells it), Unavailable, DeadlinePassed: then Triton may go on with
        it. Cancelling only stops waiting."""
        ...

    async def unload(self, name: str, *, timeout_ms: int) -> None:
        """Ask Triton to unload; running requests end first. Its return says nothing about memory: ask `index`.

        Unloading what is not loaded changes nothing. Raises as `probe`."""
        ...

    async def placed_on(self, name: str, *, timeout_ms: int) -> PlacedModel:
        """The devices that a loaded model was packaged for; none if its package named none.

        Raises as `probe`; EngineFailed if it is not loaded."""
        ...

    async def forget(self, name: str) -> None:
        """The model is gone and `index` need not list it any more. Idempotent; raises nothing."""
        ...


@dataclass(frozen=True, slots=True)
class CachedVersion:
    """Verified weights in the disk cache."""

    digest: Digest
    path: Path  # what the engine is given: the folder, or the file if the version is one file
    size: int  # bytes, shared files included
    last_used_ms: int  # Unix time of the last load
    files: tuple[ContentFile, ...] = ()


@dataclass(frozen=True, slots=True)
class Interrupted:
    """What a killed process had fetched of one file: it is gone on with when the same content is asked for."""

    key: str  # SHA-256 of the whole file
    size: int  # bytes on disk
    last_used_ms: int


@dataclass(frozen=True, slots=True)
class FoundOnDisk:
    """What a new process finds in its cache folder."""

    versions: list[CachedVersion] = field(default_factory=list)
    interrupted: list[Interrupted] = field(default_factory=list)


class Lane(Protocol):
    """The right to move the bytes of one version, shared with others by priority."""

    @property
    def is_open(self) -> bool:
        """Whether bytes may move now."""
        ...

    def wait_in_thread(self, size: int = 0) -> None:
        """Block this thread until the next chunk, of so many bytes, may move.

        Raises Unavailable: nobody wants it any more."""
        ...


class SourceReader(Protocol):
    """One open file of a source. Called from threads, blocking; several may read at once."""

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view` from `offset`; the bytes read, fewer only at the end of the file.

        Raises NotFound, Unavailable (nothing came within the source's limit, after retries)."""
        ...

    def close(self) -> None:
        """Let go of it. Idempotent."""
        ...


class WeightSource(Protocol):
    """A kind of place where versions come from. Called from threads, blocking."""

    def files(self, source: str) -> list[ContentFile]:
        """What lies there, by name, with an empty `sha256`. Raises NotFound, InvalidInput, Unavailable."""
        ...

    def open(self, source: str, file: ContentFile) -> SourceReader:
        """Open one file. Raises NotFound, Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class StageRequest:
    """One version to bring to disk. `files` may be empty: then they are found out."""

    source: str  # a path, or an address with a scheme
    digest: Digest
    files: tuple[ContentFile, ...] = ()
    size_max: int = 0  # bytes that were reserved


class WeightCache(Protocol):
    """The content-addressed disk cache. Invariant 10: what it finds is complete and has the digest it is found by."""

    async def start(self) -> FoundOnDisk:
        """Throw away what an earlier process left half-done and cannot be used; what is there.

        Raises Unavailable (folder in use)."""
        ...

    async def look(self, request: StageRequest) -> tuple[ContentFile, ...]:
        """The files of a version: those of the request if they are what its digest is over, else as the source
        lists them, with an empty `sha256`. Raises NotFound, InvalidInput, Unavailable."""
        ...

    async def find(self, digest: Digest) -> CachedVersion | None:
        """The cached version; None if there is none or if its files were changed since. Marks it as used now."""
        ...

    async def stage(self, request: StageRequest, lane: Lane, on_bytes: Callable[[int], None]) -> CachedVersion:
        """Fetch what is not here yet, and verify. `on_bytes` gets the total so far, on the event loop.

        Raises NotFound, InvalidInput (the content is not the digest's, or larger than `size_max`), Unavailable (disk,
        or the source says nothing). Afterwards, and after a failure or cancellation, no half file is left; whole ones
        of a version that failed stay until `drop`."""
        ...

    async def remove(self, digest: Digest) -> None:
        """Forget a version. Its files stay until `drop`. Idempotent."""
        ...

    async def drop(self, keys: Collection[str]) -> None:
        """Delete the files with these contents, whole or interrupted. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class ArenaView:
    """Where an engine finds files in host memory: `ranges` by name in the version, `(offset, bytes)` in the file."""

    path: Path
    ranges: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class HostVersion:
    """What an earlier process left whole in the arena: where each piece lies, `(offset, bytes with the rounding)`."""

    digest: Digest
    ranges: Mapping[str, tuple[int, int]]  # by piece key


@dataclass(frozen=True, slots=True)
class Filling:
    """One file to read into the arena."""

    path: Path
    size: int  # bytes
    offset: int  # in the arena


class WeightArena(Protocol):
    """Shared memory of fixed size that engines map. It keeps bytes; which of them mean what, `HostArena` says."""

    @property
    def capacity(self) -> int:
        """Bytes; 0 = there is none."""
        ...

    @property
    def page(self) -> int:
        """Ranges begin at multiples of this."""
        ...

    @property
    def path(self) -> Path:
        """What engines open."""
        ...

    async def start(self) -> list[HostVersion]:
        """Take over what an earlier process left, or begin anew."""
        ...

    async def fill(self, files: Sequence[Filling], lane: Lane, on_bytes: Callable[[int], None]) -> None:
        """Read files into their ranges. Raises NotFound, Unavailable.

        Cancelled: ends once no byte moves any more, so the ranges may be used again."""
        ...

    async def record(self, versions: Sequence[HostVersion]) -> None:
        """Remember, for the next process, which versions are whole. One call at a time."""
        ...


class ModelLibrary(Protocol):
    """What the catalogue says of a version, and how it is packed for Triton."""

    @property
    def is_known(self) -> bool:
        """Whether a catalogue was read: before that, an unknown name proves nothing."""
        ...

    def find(self, version: ModelVersion) -> Model:
        """The catalogue's record. Raises NotFound: no such model, or another digest."""
        ...

    def versions(self) -> Mapping[str, ModelVersion]:
        """Triton name → version, of everything in the catalogue."""
        ...

    def adapter(self, name: AdapterName, tenant_id: TenantId) -> Adapter:
        """The catalogue's record of what this tenant may use. Raises NotFound."""
        ...

    def adapters(self) -> Mapping[AdapterName, Adapter]:
        """Everything of the catalogue; another object once the catalogue has changed."""
        ...

    async def check_adapter(self, weights: Path, base: Model, base_weights: Path) -> None:
        """Raises InvalidInput: the adapter does not fit this base, and why."""
        ...

    async def device_bytes(self, model: Model) -> int:
        """Bytes one instance takes on all of its devices together, evenly: the catalogue's, else an estimate.

        Raises InvalidInput, NotFound."""
        ...

    def mapped_files(self, model: Model, files: Sequence[ContentFile]) -> tuple[ContentFile, ...]:
        """Which files the model's engine reads straight from host memory; the others it opens by path."""
        ...

    async def package(self, model: Model, weights: Path, arena: ArenaView | None, setting: Setting) -> LoadPackage:
        """What Triton is told to load.

        Raises InvalidInput: the weights are not what the engine needs, or it cannot be held to these devices."""
        ...


@dataclass(frozen=True, slots=True, order=True)
class Measured:
    """What a version took on so many devices when it was loaded last."""

    model: str
    digest: str
    devices: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Remembered:
    """What the next loader process must know and nobody else can tell it."""

    maintenance: str = ""  # why the node takes no work; empty = it does
    dead: tuple[str, ...] = ()  # Triton names whose model process died and whose unload was never confirmed
    measured: tuple[Measured, ...] = ()  # sizes that the catalogue leaves open
    loaded: tuple[Model, ...] = ()  # records of what stands on the node, also of versions that are being replaced


class NodeMemory(Protocol):
    """Survives this process."""

    async def recall(self) -> Remembered:
        """What an earlier process kept; nothing if there was none."""
        ...

    async def keep(self, remembered: Remembered) -> None:
        """Replace it. Raises Unavailable (disk)."""
        ...


@dataclass(frozen=True, slots=True)
class AuditNote:
    """One entry of the audit stream."""

    what: str  # "load", "load-failed", "unload", "evict" (from disk or host), "lost", …
    version: ModelVersion | None  # None = the node as a whole
    reason: str
    details: Mapping[str, str] = field(default_factory=dict)


class AuditTrail(Protocol):
    """The audit stream."""

    def record(self, note: AuditNote) -> None:
        """Keep it, in order, as soon as the stream takes it. Returns at once, raises nothing; a loss is logged."""
        ...


class StateSink(Protocol):
    """Who is told what the node has."""

    async def publish(self, state: loading_pb2.NodeState) -> None:
        """Tell everyone who listens now. Raises Unavailable."""
        ...

    async def keep(self, state: loading_pb2.NodeState) -> None:
        """Keep it for those who start later. Raises Unavailable."""
        ...


class Measurements(Protocol):
    """Counters and histograms of this process."""

    def load_ended(self, model: ModelName, outcome: str) -> None:
        """One load ended: "ready", "failed", "refused"."""
        ...

    def phase_took(self, phase: str, duration_ms: int) -> None:
        """One phase of a load, "stage" or "load", took so long."""
        ...

    def unloaded(self, reason: str) -> None:
        """One instance left: "evicted", "ordered", "failed", "lost", "unknown"."""
        ...

    def evicted(self, tier: str) -> None:
        """A version left "disk" or "host", or an adapter host memory ("adapters"), so that another fits."""
        ...

    def tiers(self, state: loading_pb2.NodeState) -> None:
        """The bytes of each tier and device now."""
        ...

    def not_freed(self, device: int) -> None:
        """A model was unloaded and the device did not show its memory as free in time."""
        ...

    def unaccounted(self, where: str, size: int) -> None:
        """Bytes in use beside models, more than at first: of "server" (Triton's processes) or of a device's index."""
        ...

    def server_recycled(self) -> None:
        """Triton was ended because it leaked."""
        ...

    def moving(self, done: int, total: int) -> None:
        """Bytes of what is being staged now."""
        ...
