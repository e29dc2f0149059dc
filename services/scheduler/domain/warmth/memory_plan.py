"""Which model should be in which node's memory: one budget, the most valuable first, and the moves that lead there.

What must be there (pins, minimum replicas) comes first, then whatever saves most waiting per byte, until the memory is
full. What is resident already counts a quarter more: a swap must gain more than it costs. A move is a transaction: it
names what leaves and what comes, fits whenever it is its turn, and nothing depends on a later one; whoever carries out
half of the list has left no node over-committed. What is in use or awaited never leaves (invariant 8). A plan that the
next one would partly undo is not made: its moves that evict what would come back are left out.

Pure and deterministic; O(wants × log) for nodes of like size.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from roundhouse.vocabulary import NodeId
from services.scheduler.domain.records import VersionKey

STAY = 1.25  # a resident model's value is counted this many times: a guess, see above


@dataclass(frozen=True, slots=True)
class Want:
    """What one model wants. `values[i]` = waiting saved per MiB and ms by replica i + 1; not increasing."""

    version: VersionKey
    bytes: int
    values: tuple[float, ...]
    floor: int = 0  # replicas that must be there: pins and minimum


@dataclass(frozen=True, slots=True)
class Resident:
    """A model in a node's memory."""

    version: VersionKey
    bytes: int
    held: bool = False  # in use or awaited


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """One node."""

    node_id: NodeId
    capacity: int
    residents: tuple[Resident, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """One transaction: these leave, then this is loaded."""

    node_id: NodeId
    version: VersionKey
    replica: int
    bytes: int
    unload: tuple[VersionKey, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class NotPlaced:
    """A replica that gets no room, and why."""

    version: VersionKey
    replica: int
    reason: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What to do, in order, and what there is no room for."""

    moves: tuple[Move, ...] = ()
    not_placed: tuple[NotPlaced, ...] = ()
    price: float = 0.0  # value of the least valuable replica that has room, if some have none: the price of memory


def planned(nodes: Sequence[NodeMemory], wants: Sequence[Want]) -> MemoryPlan:
    """Decide for one pool. What leaves a node does not come back there with the next plan for the same wants."""
    plan = _filled(nodes, wants)
    while back := _swapped_back(nodes, wants, plan):
        plan = _without(plan, back)
    return plan


def _filled(nodes: Sequence[NodeMemory], wants: Sequence[Want]) -> MemoryPlan:
    return _Planner(tuple(sorted(nodes, key=lambda node: node.node_id)), {want.version: want for want in wants}).plan()


def _swapped_back(
    nodes: Sequence[NodeMemory], wants: Sequence[Want], plan: MemoryPlan
) -> set[tuple[NodeId, VersionKey]]:
    """What the plan evicts and the one after it would bring back: filling by value can end otherwise from there."""
    gone = {(move.node_id, version) for move in plan.moves for version in move.unload}
    if not gone:
        return set()
    after = []
    for node in nodes:
        stay = [each for each in node.residents if (node.node_id, each.version) not in gone]
        came = [Resident(move.version, move.bytes) for move in plan.moves if move.node_id == node.node_id]
        after.append(replace(node, residents=(*stay, *came)))
    return gone & {(move.node_id, move.version) for move in _filled(after, wants).moves}


def _without(plan: MemoryPlan, back: set[tuple[NodeId, VersionKey]]) -> MemoryPlan:
    """The plan without the moves that evict these, and without what counted on their room."""
    closed, moves, refused = set[NodeId](), list[Move](), list(plan.not_placed)
    for move in plan.moves:
        if move.node_id in closed or any((move.node_id, version) in back for version in move.unload):
            closed.add(move.node_id)
            refused.append(NotPlaced(move.version, move.replica, "what it would replace would come back for it"))
        else:
            moves.append(move)
    return replace(plan, moves=tuple(moves), not_placed=tuple(refused))


@dataclass(frozen=True, slots=True, order=True)
class _Item:
    rank: tuple[int, float]  # mandatory first, then by value
    version: VersionKey
    replica: int


@dataclass(slots=True)
class _Planner:
    nodes: tuple[NodeMemory, ...]
    wants: dict[VersionKey, Want]
    room: dict[NodeId, int] = field(default_factory=dict)  # capacity less what will stay or come
    holders: dict[VersionKey, list[NodeId]] = field(default_factory=dict)
    stays: set[tuple[NodeId, VersionKey]] = field(default_factory=set)
    taken: set[tuple[NodeId, VersionKey]] = field(default_factory=set)  # resident or coming: no second one there
    coming: list[tuple[_Item, NodeId]] = field(default_factory=list)
    refused: list[NotPlaced] = field(default_factory=list)
    price: float = 0.0

    def plan(self) -> MemoryPlan:
        self.room = {node.node_id: node.capacity for node in self.nodes}
        for node in self.nodes:
            for each in node.residents:
                self.holders.setdefault(each.version, []).append(node.node_id)
                self.taken.add((node.node_id, each.version))
                if each.held:
                    self._stay(node.node_id, each.version, each.bytes)
        heap = [(-room, node_id) for node_id, room in self.room.items()]
        heapq.heapify(heap)
        for item in sorted(self._items()):
            self._settle(item, heap)
        moves = self._moves()
        return MemoryPlan(tuple(moves), tuple(self.refused), self.price if self.refused else 0.0)

    def _items(self) -> list[_Item]:
        items = []
        for want in self.wants.values():
            here = len(self.holders.get(want.version, ()))
            for place in range(max(want.floor, len(want.values))):
                value = want.values[place] if place < len(want.values) else 0.0
                must = place < want.floor
                if not must and value <= 0:
                    continue
                rank = (0 if must else 1, -value * (STAY if place < here else 1.0))
                items.append(_Item(rank, want.version, place + 1))
        return items

    def _stay(self, node_id: NodeId, version: VersionKey, size: int) -> None:
        self.stays.add((node_id, version))
        self.room[node_id] -= size

    def _settle(self, item: _Item, heap: list[tuple[int, NodeId]]) -> None:
        """Keep a resident replica, or find room for a new one."""
        want = self.wants[item.version]
        holders = self.holders.get(item.version, ())
        if item.replica <= sum((node_id, item.version) in self.stays for node_id in holders):
            return  # one that is in use stays anyway
        for node_id in holders:
            if (node_id, item.version) not in self.stays and self.room[node_id] >= want.bytes:
                self._stay(node_id, item.version, want.bytes)
                self._price(item)
                return
        passed, found = [], None
        while heap and found is None:
            room, node_id = heapq.heappop(heap)
            if -room != self.room[node_id]:
                heapq.heappush(heap, (-self.room[node_id], node_id))  # its room has shrunk meanwhile
                continue
            passed.append((room, node_id))
            if -room < want.bytes:
                break
            found = None if (node_id, item.version) in self.taken else node_id
        for entry in passed:
            heapq.heappush(heap, entry)
        if found is None:
            self.refused.append(NotPlaced(item.version, item.replica, "no node has room for anything of its worth"))
            return
        self.coming.append((item, found))
        self.taken.add((found, item.version))
        self.room[found] -= want.bytes
        self._price(item)

    def _price(self, item: _Item) -> None:
        if item.rank[0]:
            self.price = -item.rank[1]

    def _moves(self) -> list[Move]:
        leaving: dict[NodeId, list[Resident]] = {}
        free: dict[NodeId, int] = {}
        for node in self.nodes:
            free[node.node_id] = node.capacity - sum(each.bytes for each in node.residents)
            idle = [each for each in node.residents if (node.node_id, each.version) not in self.stays]
            leaving[node.node_id] = sorted(idle, key=lambda each: (-self._value(each.version), each.version))
        moves = []
        for item, node_id in self.coming:
            want, unload = self.wants[item.version], list[VersionKey]()
            while free[node_id] < want.bytes:
                victim = leaving[node_id].pop()  # the least valuable; there are enough: the room was counted so
                unload.append(victim.version)
                free[node_id] += victim.bytes
            free[node_id] -= want.bytes
            why = "must be there" if item.rank[0] == 0 else f"saves {-item.rank[1]:.3g} ms of waiting per MiB and ms"
            reason = f"replica {item.replica}: {why}"
            moves.append(Move(node_id, item.version, item.replica, want.bytes, tuple(unload), reason))
        return moves

    def _value(self, version: VersionKey) -> float:
        want = self.wants.get(version)
        return want.values[0] if want is not None and want.values else 0.0
