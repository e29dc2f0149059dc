"""On which devices a model goes when its caller names none, and whether those that he names can be.

A site fits as a whole or not at all: k devices of one link group, each with room for the share. Chosen is the one for
which the fewest must leave, then the tightest. A MIG slice on which another model stands is never chosen here: it may
be a tenant's own, which only the scheduler knows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

from services.loader.domain.device_ledger import DeviceLedger, Site
from services.loader.domain.devices import Device
from services.loader.domain.room import Leaving, NotEnough, Offered, choose_leaving
from services.loader.domain.versions import ModelVersion

_NOBODY: Mapping[ModelVersion, str] = {}
COMBINATIONS_MOST = 70  # 4 of 8: beyond it only neighbours in order of free memory are looked at


@dataclass(frozen=True, slots=True)
class Need:
    """What one model takes: `share` bytes on each of `count` devices of one link group."""

    version: ModelVersion
    count: int
    share: int
    alone_for: str = ""  # token of the tenant that has its devices alone; empty = it shares them

    @classmethod
    def of(cls, version: ModelVersion, device_bytes: int, count: int, alone_for: str = "") -> "Need":
        """Bytes in all, split evenly, rounded up."""
        return cls(version, count, -(-device_bytes // count), alone_for)


@dataclass(frozen=True, slots=True)
class Placed:
    """A site, and who has to leave it first."""

    site: Site
    leaving: tuple[ModelVersion, ...]


@dataclass(frozen=True, slots=True)
class Impossible:
    """This node can never hold it, or never there."""

    reason: str


def place(
    ledger: DeviceLedger,
    need: Need,
    offered: Sequence[Offered[ModelVersion]],
    wanted: Site = (),
    alone: Mapping[ModelVersion, str] = _NOBODY,
) -> Placed | NotEnough | Impossible:
    """The site for a model, of those `wanted` or (empty) of all. `offered` may leave, in this order.

    `alone` are those that a tenant has alone on their devices: nobody else's stand there. What the model holds already
    counts as its own. O(sites × offered)."""
    named = _check(ledger, need, wanted) if wanted else None
    if named is not None:
        return named
    possible = [wanted] if wanted else list(sites(ledger, need))
    if not possible:
        return Impossible(_why_never(ledger, need))
    allowed = possible if wanted else [site for site in possible if _is_open(ledger, need, site, offered)]
    placed: list[tuple[int, bool, int, Placed]] = []
    short = [] if allowed else [need.share * need.count]
    for site in allowed:
        strangers = _strangers(ledger, need, site, alone)
        if not strangers <= {each.key for each in offered}:
            short.append(need.share * need.count)
            continue
        choice = choose_leaving(_missing(ledger, need, site), offered, strangers)
        match choice:
            case Leaving(keys):
                slack = sum(ledger.free_on(index) for index in site)
                placed.append((len(keys), _has_slice(ledger, site), slack, Placed(site, keys)))
            case NotEnough(missing):
                short.append(missing)
    if placed:
        return min(placed, key=lambda each: (*each[:3], each[3].site))[3]
    return NotEnough(missing=min(short))


def sites(ledger: DeviceLedger, need: Need) -> Iterator[Site]:
    """Every set of devices that could hold a model if the node were empty."""
    groups: dict[int, list[Device]] = {}
    for device in ledger.devices:
        if device.capacity >= need.share:
            groups.setdefault(device.link_group, []).append(device)
    for _, devices in sorted(groups.items()):
        for chosen in _choices(ledger, devices, need.count):
            yield tuple(sorted(each.index for each in chosen))


def fits_beside(ledger: DeviceLedger, need: Need, alone: Mapping[ModelVersion, str] = _NOBODY) -> bool:
    """Whether there is room for it now without anybody leaving."""
    placed = place(ledger, need, (), alone=alone)
    return isinstance(placed, Placed)


def _check(ledger: DeviceLedger, need: Need, wanted: Site) -> Impossible | None:
    """What is wrong with named devices, if anything ever will be."""
    known = {device.index: device for device in ledger.devices}
    unknown = [str(index) for index in wanted if index not in known]
    if unknown:
        return Impossible(f"this node has no device {', '.join(unknown)}")
    if len(set(wanted)) != need.count or len(wanted) != need.count:
        return Impossible(f"it needs {need.count} devices, {len(wanted)} were named")
    if len({known[index].link_group for index in wanted}) > 1:
        return Impossible(f"devices {', '.join(map(str, wanted))} are not of one link group")
    small = [index for index in wanted if known[index].capacity < need.share]
    if small:
        return Impossible(f"needs {need.share} bytes of device {small[0]}, which has {known[small[0]].capacity}")
    return None


def _why_never(ledger: DeviceLedger, need: Need) -> str:
    if need.count == 1:
        largest = max(device.capacity for device in ledger.devices)
        return f"needs {need.share} bytes of device, this node has {largest}"
    return f"needs {need.share} bytes on each of {need.count} linked devices, which this node does not have"


def _missing(ledger: DeviceLedger, need: Need, site: Site) -> dict[int, int]:
    held = ledger.held_on(need.version)
    return {index: need.share - held.get(index, 0) - ledger.free_on(index) for index in site}


def _strangers(ledger: DeviceLedger, need: Need, site: Site, alone: Mapping[ModelVersion, str]) -> set[ModelVersion]:
    """Who cannot stay on a site beside a model: it or they are to be alone there."""
    holders = {holder for index in site for holder in ledger.holders_on(index)} - {need.version}
    return {each for each in holders if alone.get(each, "") != need.alone_for}


def _is_open(ledger: DeviceLedger, need: Need, site: Site, offered: Sequence[Offered[ModelVersion]]) -> bool:
    """Whether no stranger stands on a MIG slice of the site."""
    known = {device.index: device for device in ledger.devices}
    leaving = {each.key for each in offered}
    strangers = (
        holder
        for index in site
        if known[index].is_slice
        for holder in ledger.holders_on(index)
        if holder.model != need.version.model and holder not in leaving
    )
    return not any(strangers)


def _has_slice(ledger: DeviceLedger, site: Site) -> bool:
    return any(device.is_slice for device in ledger.devices if device.index in site)


def _choices(ledger: DeviceLedger, devices: list[Device], count: int) -> Iterator[Sequence[Device]]:
    if comb(len(devices), count) <= COMBINATIONS_MOST:
        yield from combinations(devices, count)
        return
    by_room = sorted(devices, key=lambda each: (ledger.free_on(each.index), each.index))
    for first in range(len(by_room) - count + 1):
        yield by_room[first : first + count]
