"""What the loader's operations need of the world. Adapters implement these; tests pass fakes.

Each fake passes the contract suite of the real adapter.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from roundhouse.catalogue.records import Model
from roundhouse.vocabulary import Digest, ModelName
from roundhouse.wire.v1 import loading_pb2
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

    async def forget(self, name: str) -> None:
        """The model is gone and `index` need not list it any more. Idempotent; raises nothing."""
        ...


@dataclass(frozen=True, slots=True)
class CachedVersion:
    """Verified weights in the disk cache."""

    digest: Digest
    path: Path  # what the engine is given: the folder, or the file if the version is one file
    size: int  # bytes
    last_used_ms: int  # Unix time of the last load


class WeightCache(Protocol):
    """The content-addressed disk cache. Invariant 10: what it finds is complete and has the digest it is found by."""

    async def start(self) -> list[CachedVersion]:
        """Throw away what an earlier process left half-done; what is there. Raises Unavailable (folder in use)."""
        ...

    async def measure(self, source_path: str) -> int:
        """Bytes of a version at its source. Raises NotFound, InvalidInput."""
        ...

    async def find(self, digest: Digest) -> CachedVersion | None:
        """The cached version; None if there is none or if its files were changed since. Marks it as used now."""
        ...

    async def stage(
        self, source_path: str, digest: Digest, *, size_max: int, on_bytes: Callable[[int], None]
    ) -> CachedVersion:
        """Copy from the source and verify. `on_bytes` gets the total so far, on the event loop.

        Raises NotFound, InvalidInput (the content is not the digest's, or larger than `size_max`), Unavailable (disk).
        After a failure or cancellation nothing is left."""
        ...

    async def remove(self, digest: Digest) -> None:
        """Delete a version. Idempotent."""
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

    async def device_bytes(self, model: Model) -> int:
        """Bytes one instance takes on its device: the catalogue's, else an estimate. Raises InvalidInput, NotFound."""
        ...

    async def package(self, model: Model, weights: Path) -> LoadPackage:
        """What Triton is told to load. Raises InvalidInput: the weights are not what the engine needs."""
        ...


@dataclass(frozen=True, slots=True)
class AuditNote:
    """One entry of the audit stream."""

    what: str  # "load", "load-failed", "unload", "lost"
    version: ModelVersion
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

    def tiers(self, state: loading_pb2.NodeState) -> None:
        """The bytes of each tier now."""
        ...
