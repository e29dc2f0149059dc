"""Whether a load may begin: it fits the node at all, and room can be made from what may leave.

Either everything is promised in one step or nothing changed (case B22): no byte is staged and nobody is told to leave
for a load that cannot happen. The device's free bytes are reserved at once; those of the instances that must leave are
promised, and pass to the load in the step that releases them. Until then they stay loaded: if the weights turn out to
be bad, nobody was unloaded for them.
"""

from collections.abc import Collection, Hashable, Sequence
from typing import TypeVar

from roundhouse.catalogue.records import ContentFile
from roundhouse.errors import CapacityExhausted, InvalidInput
from roundhouse.vocabulary import Digest
from services.loader.domain.contents import Piece, choose_content_evictions
from services.loader.domain.instance import State
from services.loader.domain.room import Leaving, NotEnough, Offered
from services.loader.domain.sites import Impossible, Placed, place
from services.loader.domain.versions import ModelVersion
from services.loader.operations.node import Node, Residence

Key = TypeVar("Key", bound=Hashable)

NEVER_FITS = "never_fits"
"""`code` of the error for what this node can never hold."""


def choose_place(node: Node, home: Residence) -> Placed:
    """On which devices `home` goes, and who must leave them, of those its caller allowed. Changes no account.

    A load that has begun stays where it is. Raises InvalidInput with code NEVER_FITS, CapacityExhausted."""
    offered = [
        Offered(version, node.device.held_on(version))
        for version in dict.fromkeys(home.unload_first)
        if _may_leave(node, version)
        and not _made_room_in_vain(node, version, home)
        and version != home.instance.version
    ]
    begun = node.device.site_of(home.instance.version)
    if not begun:
        home.site = ()
    choice = place(node.device, home.need, offered, begun or home.wanted_site, node.alone())
    match choice:
        case Placed():
            return choice
        case Impossible(reason):
            raise InvalidInput(reason, code=NEVER_FITS)
        case NotEnough(missing):
            raise _no_room("device", missing)


def pieces_of(digest: Digest, files: Sequence[ContentFile]) -> list[Piece]:
    """What a version takes on disk; a file whose content is not known yet shares with nobody."""
    return [Piece(file.sha256 or f"{digest}/{file.name}", file.size) for file in files]


def check_disk(node: Node, digest: Digest, pieces: Sequence[Piece], staging: Collection[Digest]) -> tuple[Digest, ...]:
    """Which cached versions must go so that `digest` fits on disk. Changes nothing.

    Raises as `choose_victims`."""
    total = sum({piece.key: piece.size for piece in pieces}.values())
    _refuse_what_never_fits("disk", total, node.disk.capacity)
    in_use = {*node.digests_in_use(), *staging}
    unused = sorted(
        (each for each in node.disk.contents if each not in in_use), key=lambda each: node.disk_used_ms.get(each, 0)
    )
    return _keys(choose_content_evictions(node.disk, digest, pieces, unused), "disk")


def _may_leave(node: Node, version: ModelVersion) -> bool:
    home = node.residences.get(version)
    return home is not None and home.instance.state is State.READY and home.promised_to is None


def _made_room_in_vain(node: Node, version: ModelVersion, home: Residence) -> bool:
    """Whether it is the old version of what could not be loaded in its place: it goes on serving."""
    return node.residences[version].succeeded_by == home.instance.version and home.instance.failures > 0


def _refuse_what_never_fits(tier: str, size: int, capacity: int) -> None:
    if size > capacity:
        raise InvalidInput(f"needs {size} bytes of {tier}, this node has {capacity}", code=NEVER_FITS)


def _keys(choice: Leaving[Key] | NotEnough, tier: str) -> tuple[Key, ...]:
    match choice:
        case Leaving(keys):
            return keys
        case NotEnough(missing):
            raise _no_room(tier, missing)


def _no_room(tier: str, missing: int) -> CapacityExhausted:
    return CapacityExhausted(f"{missing} bytes of {tier} are missing beside what may not be unloaded")
