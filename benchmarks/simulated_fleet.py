"""A fleet on virtual time under the production queue and placement: discrete events, no I/O. Not a benchmark by itself.

What is real: `FairQueue` (who is next, what is charged, drains and claims) and `plan` (what is loaded where, and what
leaves). What is modelled: how long loads and runs take, and nodes that die. Every invariant that can be seen from here
is asserted while it runs: memory is never overspent (6), nothing is unloaded while in use (8), nothing runs twice, and
at the end every request has ended once (1) and no slot is held.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from roundhouse.vocabulary import NodeId, Outcome, PoolName, PriorityClass, TenantId
from services.scheduler.domain.fair_queue import FairQueue
from services.scheduler.domain.nodes import InstanceView, NodeView, Residence, Tier, VersionSpec
from services.scheduler.domain.placement import Load, PoolView, ResidencyPolicy, plan
from services.scheduler.domain.plans import NodeIndex
from services.scheduler.domain.records import (
    AttemptId,
    Draining,
    Ending,
    LoadClaim,
    Offer,
    Queued,
    QueueEntry,
    Room,
    Tokens,
    VersionKey,
    attempt_id,
    instance_key,
)
from services.scheduler.domain.residency import Claimed, ClaimOrder, DrainOrder
from services.scheduler.domain.service import Policy

POOL = PoolName("shared")
FOREVER_MS = 10**12
TICK_MS = 250  # as the scheduler's upkeep
TRIES_MAX = 2  # attempts of a request whose node died, as the gateway's
TAKE_MAX = 64
UNLOAD_MS = 200  # see `cold_start.py`


@dataclass(frozen=True, slots=True)
class ModelCost:
    """One model and what it costs. Bytes on the device include its KV pool; tokens are charged to its slots."""

    version: VersionKey
    device_bytes: int
    weight_bytes: int
    slots: int
    prefill_us: int  # a token
    decode_us: int  # a token
    start_ms: int  # of the engine, with the weights in host memory
    slo_ms: int


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes a millisecond from each tier towards the device, and what each node's host memory keeps."""

    source: int
    disk: int
    host: int
    host_bytes: int


@dataclass(slots=True)
class Request:
    """One request of the workload and what became of it."""

    at_ms: int
    tenant: str
    priority_class: PriorityClass
    model: int
    input_tokens: int
    output_tokens: int
    output_tokens_max: int
    patience_ms: int
    tries: int = 0
    granted_ms: int = -1
    ended: str = ""
    cold: bool = False


@dataclass(slots=True)
class _Node:
    node_id: NodeId
    capacity: int
    free: int
    instances: dict[VersionKey, InstanceView] = field(default_factory=dict)
    host: OrderedDict[VersionKey, int] = field(default_factory=OrderedDict)
    disk: set[VersionKey] = field(default_factory=set)
    healthy: bool = True
    view: NodeView | None = None


class Fleet:
    """One run."""

    def __init__(self, models: list[ModelCost], nodes: int, capacity: int, speeds: Speeds, policy: Policy) -> None:
        self.queue = FairQueue(replace(policy, lease_ms=FOREVER_MS))
        self.now_ms = 0
        self.counts: Counter[str] = Counter()
        self.busy_ms = 0
        self._models, self._by_version = models, {each.version: each for each in models}
        self._speeds = speeds
        self._nodes = {NodeId(f"n{n:04d}"): _Node(NodeId(f"n{n:04d}"), capacity, capacity) for n in range(nodes)}
        self._specs = {
            each.version: VersionSpec(each.version, each.device_bytes, start_slo_ms=each.slo_ms) for each in models
        }
        self._offers: dict[VersionKey, list[Offer]] = {}
        self._running: dict[AttemptId, tuple[Request, NodeId, VersionKey]] = {}
        self._requests: dict[AttemptId, Request] = {}
        self._cold: set[VersionKey] = set()
        self._events: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._planned_ms = -1
        self._index: NodeIndex | None = None  # of the nodes as the last plan saw them, while none has changed

    def at(self, time_ms: int, what: Callable[..., None], *arguments: Any) -> None:
        """Do something at a time."""
        self._number += 1
        heapq.heappush(self._events, (time_ms, self._number, what, arguments))

    def run(self, requests: Iterable[Request]) -> None:
        """Play the requests, which are in order of time, until all have ended."""
        requests = iter(requests)
        coming = next(requests, None)
        while coming is not None or self._events:
            if coming is not None and (not self._events or coming.at_ms < self._events[0][0]):
                self.now_ms = coming.at_ms
                self._arrive(coming)
                coming = next(requests, None)
                continue
            self.now_ms, _, what, arguments = heapq.heappop(self._events)
            what(*arguments)
        assert not self._running, "a slot is still held"
        assert not any(self.queue.in_use.values()), "a slot was lost"

    # -- requests ---------------------------------------------------------------------------------------------------

    def _arrive(self, request: Request) -> None:
        request.tries += 1
        model = self._models[request.model]
        self._number += 1
        entry = QueueEntry(
            attempt_id(str(self._number), 1),
            TenantId(request.tenant),
            model.version,
            request.priority_class,
            request.input_tokens,
            request.output_tokens_max,
            request.at_ms + request.patience_ms,
        )
        offers = self._offers.get(model.version, ())
        slots = sum(offer.slots for offer in offers)
        cold_ms = 0 if slots else model.weight_bytes // self._speeds.disk + model.start_ms
        answer = self.queue.enqueue(entry, Room(10_000, slots, cold_ms), self.now_ms)
        if not isinstance(answer, Queued):
            self._end(request, type(answer).__name__)
            return
        self._requests[entry.attempt] = request
        if offers:
            self._take(model.version)
        else:
            request.cold = True
        if model.version not in self._cold and self.queue.waiting(model.version):
            self._cold.add(model.version)
            self._want_plan()

    def _take(self, version: VersionKey) -> None:
        taken = self.queue.take(self._offers.get(version, ()), TAKE_MAX, self.now_ms)
        for ticket in taken.refused:
            self._end(self._requests.pop(ticket.attempt), "Expired")
        for ticket in taken.granted:
            request, node_id = self._requests.pop(ticket.attempt), NodeId(ticket.place.decode())
            model = self._by_version[version]
            request.granted_ms = self.now_ms
            run_us = request.input_tokens * model.prefill_us + request.output_tokens * model.decode_us
            self._running[ticket.attempt] = (request, node_id, version)
            self.at(self.now_ms + max(1, run_us // 1000), self._finish, ticket.attempt, Outcome.DONE)

    def _finish(self, attempt: AttemptId, outcome: Outcome) -> None:
        if attempt not in self._running:
            return  # its node died first
        request, _, version = self._running.pop(attempt)
        run_ms = self.now_ms - request.granted_ms
        self.busy_ms += run_ms
        used = Tokens(request.input_tokens, 0, request.output_tokens if outcome is Outcome.DONE else 0)
        self.queue.finish(Ending(attempt, outcome, used, run_ms), self.now_ms)
        if outcome is Outcome.DONE:
            self._end(request, "Done")
        elif request.tries < TRIES_MAX:
            self.counts["retries"] += 1
            self._arrive(request)
        else:
            self._end(request, "Failed")
        if self.queue.waiting(version):
            self._take(version)

    def _end(self, request: Request, how: str) -> None:
        assert not request.ended, "a request ended twice"
        request.ended = how
        self.counts[how] += 1

    # -- placement --------------------------------------------------------------------------------------------------

    def _want_plan(self) -> None:
        due_ms = (self.now_ms // TICK_MS + 1) * TICK_MS
        if due_ms > self._planned_ms:
            self._planned_ms = due_ms
            self.at(due_ms, self._tick)

    def _tick(self) -> None:
        for ticket in self.queue.expire(self.now_ms).refused:
            self._end(self._requests.pop(ticket.attempt), "Expired")
        self._cold = {version for version in self._cold if self.queue.waiting(version)}
        if self._cold or self.queue.residency.drains:
            self._plan()
            self._want_plan()

    def _plan(self) -> None:
        self.counts["plans"] += 1
        if self._index is None:
            self._index = NodeIndex.of(tuple(map(self._view, self._nodes.values())))
        view = PoolView(self._index.nodes, self.queue.snapshot(), self._specs, index=self._index)
        decided = plan(view, ResidencyPolicy(), self.now_ms)
        for reopened in decided.reopen:
            self.queue.residency.clear_drain(reopened.instance)
        for rotation in decided.rotations:
            victim = rotation.victim
            order = DrainOrder(victim.instance, victim.version, rotation.purpose, FOREVER_MS, rotate=True)
            self.queue.begin_drain(order, self.now_ms)
        for load in decided.loads:
            self._begin(load)
        for version in list(self._cold):
            if self._offers.get(version):
                self._take(version)

    def _begin(self, load: Load) -> None:
        claim = LoadClaim(load.node_id, "me", FOREVER_MS, load.bytes)
        revision = self.queue.residency.revision
        if not isinstance(self.queue.claim_load(ClaimOrder(load.version, claim, revision), self.now_ms), Claimed):
            return
        for victim in load.victims:
            order = DrainOrder(victim.instance, victim.version, load.version, FOREVER_MS, rotate=False)
            answer = self.queue.begin_drain(order, self.now_ms)
            assert isinstance(answer, Draining), "the plan was made from this very state"
            assert answer.in_use == 0, "invariant 8"
        node = self._nodes[load.node_id]
        for victim in load.victims:
            self._drop(node, victim.version)
            self.counts["evictions"] += 1
        model = self._by_version[load.version]
        node.free -= model.device_bytes
        assert node.free >= 0, "invariant 6"
        stage_ms, start_ms = self._stage_ms(node, model), model.start_ms + model.weight_bytes // self._speeds.host
        instance = InstanceView(
            load.version,
            Residence.LOADING,
            model.device_bytes,
            model.slots,
            self.now_ms,
            stage_ms,
            start_ms,
            remaining_ms=stage_ms + start_ms,
        )
        node.instances[load.version] = instance
        self._changed(node)
        self.counts["loads"] += 1
        ready_ms = self.now_ms + UNLOAD_MS * bool(load.victims) + stage_ms + start_ms
        self.at(ready_ms, self._loaded, node, load, instance)

    def _stage_ms(self, node: _Node, model: ModelCost) -> int:
        if model.version in node.host:
            node.host.move_to_end(model.version)
            return 0
        speed = self._speeds.disk if model.version in node.disk else self._speeds.source
        node.disk.add(model.version)
        node.host[model.version] = model.weight_bytes
        while sum(node.host.values()) > self._speeds.host_bytes:
            node.host.popitem(last=False)
        return model.weight_bytes // speed

    def _loaded(self, node: _Node, load: Load, begun: InstanceView) -> None:
        book = self.queue.residency
        for victim in load.victims:
            book.clear_drain(victim.instance, load.version)
        book.release_load(load.version, load.node_id, "me", None)
        if node.instances.get(load.version) is not begun:
            return  # the node died meanwhile
        node.instances[load.version] = replace(
            begun, residence=Residence.READY, since_ms=self.now_ms, remaining_ms=0, tier=Tier.HOST
        )
        self._changed(node)
        key = instance_key(node.node_id, load.version)
        offer = Offer(key, load.version, begun.slots, node.node_id.encode())
        self._offers.setdefault(load.version, []).append(offer)
        self._take(load.version)

    def _drop(self, node: _Node, version: VersionKey) -> None:
        instance = node.instances.pop(version)
        node.free += instance.device_bytes
        self._changed(node)
        key = instance_key(node.node_id, version)
        if version in self._offers:
            self._offers[version] = [offer for offer in self._offers[version] if offer.instance != key]

    def _changed(self, node: _Node) -> None:
        node.view = self._index = None

    def _view(self, node: _Node) -> NodeView:
        if node.view is None:
            instances = tuple(node.instances.values())
            node.view = NodeView(node.node_id, POOL, node.healthy, node.capacity, max(0, node.free), instances)
        return node.view

    # -- faults -----------------------------------------------------------------------------------------------------

    def kill(self, node_id: NodeId, for_ms: int) -> None:
        """The node dies with all that runs on it, and comes back empty, but with its disk."""
        node = self._nodes[node_id]
        if not node.healthy:
            return
        self.counts["node_deaths"] += 1
        node.healthy = False
        for version in list(node.instances):
            self._drop(node, version)
        node.host.clear()
        self._changed(node)
        for attempt in [each for each, (_, at, _) in self._running.items() if at == node_id]:
            self._finish(attempt, Outcome.FAILED)
        self.at(self.now_ms + for_ms, self._revive, node)

    def _revive(self, node: _Node) -> None:
        node.healthy = True
        self._changed(node)
