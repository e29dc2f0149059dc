"""The account of a node's devices: one ledger each, and a model takes its share of all of its devices or of none.

    device 0  |== m1 ==|== gang ==|......|
    device 1  |-- m2 --|== gang ==|.....x|      x: in use, and no model answers for it

Immutable, as the ledgers that it is made of, and with the same words. Invariant 6 holds on every device:
`resident + reserved + unaccounted ≤ capacity`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.loader.domain.devices import Device
from services.loader.domain.memory_ledger import Holding, MemoryLedger, NoRoom
from services.loader.domain.versions import ModelVersion

Site = tuple[int, ...]
"""Indices of the devices that a model stands on, in rising order."""


@dataclass(frozen=True, slots=True)
class DeviceLedger:
    """Bytes of every device of a node. Each change is O(devices of the holder × holders)."""

    devices: tuple[Device, ...]
    ledgers: Mapping[int, MemoryLedger[ModelVersion]]
    unaccounted: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, ledger in self.ledgers.items():
            assert self.unaccounted.get(index, 0) <= ledger.free, "invariant 6: more is held than there is"

    @classmethod
    def of(cls, devices: Sequence[Device]) -> "DeviceLedger":
        """Nothing held yet."""
        assert devices, "a node has a device"
        return cls(tuple(devices), {each.index: MemoryLedger(each.capacity) for each in devices})

    @property
    def capacity(self) -> int:
        """Bytes of all devices."""
        return sum(ledger.capacity for ledger in self.ledgers.values())

    @property
    def resident(self) -> int:
        """Bytes that are taken on all devices, by models or unaccounted for."""
        return sum(self.resident_on(index) for index in self.ledgers)

    @property
    def reserved(self) -> int:
        """Bytes that are promised on all devices."""
        return sum(ledger.reserved for ledger in self.ledgers.values())

    def resident_on(self, index: int) -> int:
        """Bytes of one device that are taken, by models or unaccounted for."""
        return self.ledgers[index].resident + self.unaccounted.get(index, 0)

    def free_on(self, index: int) -> int:
        """Bytes of one device that anyone may still reserve."""
        return self.ledgers[index].free - self.unaccounted.get(index, 0)

    def models_on(self, index: int) -> int:
        """Bytes of one device that models hold, there or promised."""
        return self.ledgers[index].resident + self.ledgers[index].reserved

    def holders_on(self, index: int) -> Iterable[ModelVersion]:
        """Who has something on one device, there or promised."""
        return self.ledgers[index].holdings.keys()

    def site_of(self, key: ModelVersion) -> Site:
        """The devices on which a holder has something; empty = nothing anywhere."""
        return tuple(sorted(index for index, ledger in self.ledgers.items() if key in ledger.holdings))

    def held_by(self, key: ModelVersion) -> Holding:
        """What a holder has on all devices."""
        held = [ledger.held_by(key) for ledger in self.ledgers.values()]
        return Holding(sum(each.reserved for each in held), sum(each.resident for each in held))

    def held_on(self, key: ModelVersion) -> dict[int, int]:
        """Bytes of a holder on each of its devices."""
        return {index: ledger.held_by(key).total for index, ledger in self.ledgers.items() if key in ledger.holdings}

    def missing(self, key: ModelVersion, site: Site, share: int) -> int:
        """How many bytes a holder still lacks on a site, on all of its devices together."""
        return sum(max(0, share - self.ledgers[index].held_by(key).total) for index in site)

    def reserve(self, key: ModelVersion, site: Site, share: int) -> "DeviceLedger | NoRoom":
        """Promise `share` bytes on each device of a site to a holder that has nothing yet, or nothing on any."""
        short = sum(max(0, share - self.free_on(index)) for index in site)
        if short:
            return NoRoom(missing=short)
        return self.reserve_up_to(key, site, share)

    def reserve_up_to(self, key: ModelVersion, site: Site, share: int) -> "DeviceLedger":
        """Raise a holder's promise towards `share` bytes on each device by what is free there. Idempotent."""
        assert set(self.site_of(key)) <= set(site), f"{key} stands elsewhere"
        changed = {}
        for index in site:
            ledger = self.ledgers[index]
            most = ledger.held_by(key).total + max(0, self.free_on(index))
            changed[index] = ledger.reserve_up_to(key, min(share, most))
        return self._with(changed)

    def commit(self, key: ModelVersion) -> "DeviceLedger":
        """The promised bytes of a holder are there now. Idempotent."""
        return self._with({index: self.ledgers[index].commit(key) for index in self.site_of(key)})

    def resize(self, key: ModelVersion, share: int) -> "DeviceLedger | NoRoom":
        """Correct the resident bytes of a holder on each of its devices to what was measured."""
        changed: dict[int, MemoryLedger[ModelVersion]] = {}
        for index in self.site_of(key):
            short = share - self.ledgers[index].held_by(key).resident - self.free_on(index)
            ledger = self.ledgers[index].resize(key, share)
            if short > 0 or isinstance(ledger, NoRoom):
                return NoRoom(missing=max(0, short))
            changed[index] = ledger
        return self._with(changed)

    def release(self, key: ModelVersion) -> "DeviceLedger":
        """The holder has nothing any more on any device. Idempotent."""
        return self._with({index: self.ledgers[index].release(key) for index in self.site_of(key)})

    def found_unaccounted(self, index: int, size: int) -> "DeviceLedger":
        """So many bytes of a device are in use and no model answers for them; as far as the account has room for it."""
        return replace(self, unaccounted={**self.unaccounted, index: max(0, min(size, self.ledgers[index].free))})

    def _with(self, changed: Mapping[int, MemoryLedger[ModelVersion]]) -> "DeviceLedger":
        return replace(self, ledgers={**self.ledgers, **changed})
