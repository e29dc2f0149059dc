"""All that one loader knows of its node: the instances, the ledgers, and who waits for a change.

One event loop owns it; nothing here awaits between reading and changing. It decides nothing: `domain` does, and
`steps` applies it.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from roundhouse.catalogue.records import Model
from roundhouse.errors import RoundhouseError
from roundhouse.vocabulary import Digest
from services.loader.domain.instance import Instance
from services.loader.domain.memory_ledger import MemoryLedger
from services.loader.domain.versions import ModelVersion, triton_model_name


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


@dataclass(slots=True)
class Residence:
    """One version on this node: its life, and what its current load needs to know."""

    instance: Instance
    triton_name: str
    model: Model
    device_bytes: int = 0
    bytes_done: int = 0
    bytes_total: int = 0
    unload_first: tuple[ModelVersion, ...] = ()
    reason: str = ""  # why the last order was given
    promised_to: ModelVersion | None = None  # the load that gets its bytes
    refusal: RoundhouseError | None = None  # why attempt `refused_attempt` was not admitted
    refused_attempt: int = 0


@dataclass(slots=True)
class Node:
    """The aggregate of one node."""

    device: MemoryLedger[ModelVersion]
    host: MemoryLedger[Digest]
    disk: MemoryLedger[Digest]
    residences: dict[ModelVersion, Residence] = field(default_factory=dict)
    disk_used_ms: dict[Digest, int] = field(default_factory=dict)
    disk_leaving: set[Digest] = field(default_factory=set)  # being deleted: nobody may count on their bytes twice
    host_used_ms: dict[Digest, int] = field(default_factory=dict)
    unhealthy_reason: str = "the node's Triton was not asked yet"
    draining: bool = False
    dead: set[str] = field(default_factory=set)
    """Triton names whose model process died: the memory is free, whatever Triton's index says, until the next load."""
    changes: Changes = field(default_factory=Changes)
    """States and health: what the mesh is told at once."""
    progress: Changes = field(default_factory=Changes)
    """Also bytes of a running load: for its callers."""

    @property
    def accepting(self) -> bool:
        """Whether new work may come here."""
        return not self.draining and not self.unhealthy_reason

    def settle_in(self, version: ModelVersion, model: Model) -> Residence:
        """The residence of a version, made if it is new; takes the catalogue's latest record of it."""
        home = self.residences.get(version)
        if home is None:
            home = Residence(Instance(version), triton_model_name(version), model)
            self.residences[version] = home
        home.model = model
        return home

    def digests_in_use(self) -> frozenset[Digest]:
        """Weights that are loaded or being loaded."""
        return frozenset(
            version.digest for version, home in self.residences.items() if not home.instance.state.is_at_rest
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
