"""A node and a gateway as the scheduler meets them: just enough of each to drive it over any `EventBus`.

The node keeps a real ledger and refuses what the real loader refuses; it records every load and unload, and fails the
test at once if an instance in use is unloaded (invariant 8) or memory is overspent (invariant 6). The gateway counts
how each request ended (invariant 1).
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from roundhouse import subjects
from roundhouse.catalogue.records import Catalogue, Engine, Interface, Model
from roundhouse.clock import Clock
from roundhouse.errors import CapacityExhausted, DeadlinePassed, Unavailable
from roundhouse.event_bus import EventBus, Message
from roundhouse.vocabulary import Digest, ModelName, PoolName, PriorityClass
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from roundhouse.wire.v1 import scheduling_pb2 as wire

POOL = PoolName("shared")


def model(name: str, **fields: object) -> Model:
    """A language model with sizes that tests override."""
    values: dict[str, object] = {
        "name": ModelName(name),
        "source_path": f"/models/{name}",
        "engine": Engine.REFERENCE,
        "interface": Interface.LLM,
        "digest": Digest(f"sha256:{name}"),
        "slots": 2,
        "device_bytes": 100,
        "context_tokens": 4096,
    }
    return Model(**(values | fields))  # type: ignore[arg-type]


def catalogue(*models: Model) -> Catalogue:
    """A catalogue of models; unknown tenants get default limits."""
    return Catalogue(generation=1, models={each.name: each for each in models})


@dataclass
class FixedCatalogue:
    """`CatalogueSource` that a test sets."""

    current: Catalogue


@dataclass
class FakeNode:
    """A loader and its Triton. `now_running` is what gateways stream from it."""

    bus: EventBus
    clock: Clock
    source: FixedCatalogue
    node_id: str = "n1"
    capacity: int = 100
    load_ms: int = 1_000
    broken: set[str] = field(default_factory=set)  # models whose load fails
    dead: set[str] = field(default_factory=set)  # models whose process died: ready by name only
    stuck: set[str] = field(default_factory=set)  # models whose unload is never confirmed
    unloading: dict[str, int] = field(default_factory=dict)
    silent: bool = False
    ready: dict[str, int] = field(default_factory=dict)  # model → since
    loading: dict[str, int] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    unloads: list[str] = field(default_factory=list)
    now_running: Counter[str] = field(default_factory=Counter)
    sequence: int = 0
    address: str = ""  # of its loader; empty = its id
    instances_max: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def state(self) -> loading_pb2.NodeState:
        """What it says of itself."""
        self.sequence += 1
        state = loading_pb2.NodeState(
            node_id=self.node_id,
            sequence=self.sequence,
            incarnation="a",
            sent_unix_ms=self.clock.now_ms(),
            pool=POOL,
            role=vocabulary_pb2.NODE_ROLE_MIXED,
            accepting=True,
            triton_grpc_address=f"{self.node_id}:8001",
            loader_address=self.address or self.node_id,
        )
        used = sum(self._size(name) for name in (*self.ready, *self.unloading))
        reserved = sum(self._size(name) for name in self.loading)
        assert used + reserved <= self.capacity, "invariant 6"
        state.tiers.add(tier=vocabulary_pb2.TIER_DEVICE, capacity=self.capacity, resident=used, reserved=reserved)
        for residence, names in (
            (vocabulary_pb2.INSTANCE_STATE_READY, self.ready),
            (vocabulary_pb2.INSTANCE_STATE_LOADING, self.loading),
            (vocabulary_pb2.INSTANCE_STATE_UNLOADING, self.unloading),
        ):
            for name, since_ms in names.items():
                spec = self.source.current.models[ModelName(name)]
                state.instances.add(
                    version=vocabulary_pb2.ModelVersion(model=name, digest=spec.digest),
                    state=residence,
                    triton_model_name=f"{name}--1",
                    device_bytes=spec.device_bytes,
                    state_since_unix_ms=since_ms,
                    load_ms=self.load_ms,
                    slots=spec.slots,
                )
        return state

    async def announce(self) -> None:
        """Publish the state, unless it has gone silent."""
        if not self.silent:
            await self.bus.publish(subjects.node_state(self.node_id), self.state().SerializeToString())

    async def live(self) -> None:
        """Announce each second until cancelled."""
        while True:
            await self.announce()
            await self.clock.sleep_ms(1_000)

    async def load(self, request: loading_pb2.EnsureLoadedRequest) -> AsyncIterator[loading_pb2.LoadProgress]:
        """EnsureLoaded. The load is the node's own work: it goes on when the caller leaves."""
        name = request.version.model
        if self.silent:
            raise Unavailable("the loader is away")
        if name not in self.ready and name not in self.loading:
            victims = [victim.model for victim in request.unload_first]
            if self.stuck & set(victims):
                await self._wait_in_vain(self.stuck & set(victims), request.deadline_ms)
            self._make_room(name, victims)
            self.loads.append(name)
            self.loading[name] = self.clock.now_ms()
            task = asyncio.create_task(self._load(name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        yield loading_pb2.LoadProgress(state=vocabulary_pb2.INSTANCE_STATE_LOADING)
        while name in self.loading:
            await self.clock.sleep_ms(10)
        if name not in self.ready:
            raise Unavailable(f"{name}: the weights file is empty")
        yield loading_pb2.LoadProgress(state=vocabulary_pb2.INSTANCE_STATE_READY)

    async def _wait_in_vain(self, victims: set[str], deadline_ms: int) -> None:
        for victim in victims:
            self.unloading[victim] = self.ready.pop(victim)
        await self.announce()
        await self.clock.sleep_ms(deadline_ms)
        raise DeadlinePassed("what had to leave first was not gone")

    async def _load(self, name: str) -> None:
        await self.announce()
        await self.clock.sleep_ms(self.load_ms)
        del self.loading[name]
        if name not in self.broken:
            self.ready[name] = self.clock.now_ms()
            self.instances_max = max(self.instances_max, len(self.ready))
        await self.announce()

    async def unload(self, request: loading_pb2.EnsureUnloadedRequest) -> None:
        """EnsureUnloaded; whatever runs there has died already."""
        name = request.version.model
        self.dead.discard(name)
        if name in self.stuck:
            self.unloading[name] = self.ready.pop(name, self.unloading.get(name, 0))
            await self.announce()
            raise DeadlinePassed("it is still unloading")
        if self.ready.pop(name, None) is not None:
            self.unloads.append(name)
            await self.announce()

    def _make_room(self, name: str, victims: list[str]) -> None:
        for victim in victims:
            if self._free() >= self._size(name):
                break
            if victim in self.ready:
                assert not self.now_running[victim], f"invariant 8: {victim} is in use"
                del self.ready[victim]
                self.unloads.append(victim)
        if self._free() < self._size(name):
            raise CapacityExhausted(f"{name} does not fit")

    def _free(self) -> int:
        return self.capacity - sum(self._size(each) for each in (*self.ready, *self.loading, *self.unloading))

    def _size(self, name: str) -> int:
        return self.source.current.models[ModelName(name)].device_bytes


@dataclass
class FakeLoaders:
    """`LoaderFleet` of fake nodes; a node's address is its id."""

    nodes: dict[str, FakeNode] = field(default_factory=dict)

    async def ensure_loaded(
        self, address: str, request: loading_pb2.EnsureLoadedRequest
    ) -> AsyncIterator[loading_pb2.LoadProgress]:
        async for progress in self.nodes[address].load(request):
            yield progress

    async def ensure_unloaded(self, address: str, request: loading_pb2.EnsureUnloadedRequest) -> None:
        await self.nodes[address].unload(request)


@dataclass
class Asked:
    """One request as its client sees it."""

    request: wire.SubmitRequest
    run_ms: int = 100
    output_tokens: int = 10
    endings: list[str] = field(default_factory=list)
    submitted_ms: int = 0
    granted_ms: int = 0
    ended_ms: int = 0
    accepted: bool = False
    grant: wire.Grant | None = None


@dataclass
class FakeGateway:
    """Submits, streams for `run_ms`, reports. `crash` stops everything at once, without a word."""

    bus: EventBus
    clock: Clock
    nodes: dict[str, FakeNode]
    gateway_id: str = "g1"
    asked: dict[tuple[str, int], Asked] = field(default_factory=dict)
    crashed: bool = False
    broken_at_end: set[str] = field(default_factory=set)  # requests that find their instance dead when they end
    finished: list[tuple[int, wire.Finished]] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _started: set[tuple[str, int]] = field(default_factory=set)

    async def start(self) -> None:
        """Listen for grants."""
        await self.bus.subscribe(subjects.gateway_grant(self.gateway_id), self._on_delivery, concurrency=64)

    def ask(self, request_id: str, model: Model, **fields: object) -> Asked:
        """Make a request; not sent yet."""
        values: dict[str, object] = {
            "request_id": request_id,
            "attempt": 1,
            "gateway_id": self.gateway_id,
            "tenant_id": "t1",
            "model": model.name,
            "model_digest": model.digest,
            "priority_class": PriorityClass.STANDARD.to_wire(),
            "input_tokens": 10,
            "max_output_tokens": 10,
            "deadline_unix_ms": self.clock.now_ms() + 120_000,
            "pool": POOL,
        }
        run_ms = int(str(fields.pop("run_ms", 100)))
        return Asked(wire.SubmitRequest(**(values | fields)), run_ms)  # type: ignore[arg-type]

    async def submit(self, asked: Asked) -> wire.SubmitReply | None:
        """Send; None if nobody answered even the third time (then the client was told so)."""
        key = (asked.request.request_id, asked.request.attempt)
        self.asked[key] = asked
        asked.submitted_ms = self.clock.now_ms()
        task = asyncio.create_task(self._watch_deadline(asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        for _ in range(3):
            try:
                data = await self.bus.request(subjects.WORK_SUBMIT, asked.request.SerializeToString())
            except Unavailable:
                await self.clock.sleep_ms(100)
                continue
            reply = wire.SubmitReply.FromString(data)
            asked.accepted = reply.WhichOneof("result") == "accepted"
            if not asked.accepted and not asked.endings:
                self._end(asked, "refused")
            return reply
        if not asked.endings and key not in self._started:
            await self.cancel(asked)
        return None

    async def _watch_deadline(self, asked: Asked) -> None:
        """The gateway's own guard, for when the scheduler's word is lost; later than the real one, to see that word."""
        await self.clock.sleep_ms(asked.request.deadline_unix_ms + 800 - self.clock.now_ms())
        key = (asked.request.request_id, asked.request.attempt)
        if not asked.endings and key not in self._started:
            await self.cancel(asked, "expired")

    async def cancel(self, asked: Asked, how: str = "cancelled") -> None:
        """The client leaves, or the deadline passes."""
        self._end(asked, how)
        cancel = wire.Cancel(
            request_id=asked.request.request_id, attempt=asked.request.attempt, gateway_id=self.gateway_id, pool=POOL
        )
        await self.bus.publish(subjects.WORK_CANCEL, cancel.SerializeToString())

    def crash(self) -> None:
        """End without a word; its streams end with it."""
        self.crashed = True
        for task in self._tasks:
            task.cancel()

    async def live(self) -> None:
        """Heartbeat each second; end what is past its deadline, as the real gateway does."""
        while not self.crashed:
            now_ms = self.clock.now_ms()
            self.finished = [(at, each) for at, each in self.finished if now_ms - at < 5_000]
            beat = wire.Heartbeat(gateway_id=self.gateway_id, sent_unix_ms=now_ms)
            for key in self._started:
                asked = self.asked[key]
                if not asked.endings:
                    beat.leases.add(request_id=key[0], attempt=key[1], pool=POOL, input_tokens=10, output_tokens=1)
            beat.finished.extend(each for _, each in self.finished)
            await self.bus.publish(subjects.WORK_HEARTBEAT, beat.SerializeToString())
            await self.clock.sleep_ms(1_000)

    async def _on_delivery(self, message: Message) -> bytes | None:
        if self.crashed:
            return None
        delivery = wire.GrantDelivery.FromString(message.data)
        what = delivery.grant if delivery.WhichOneof("what") == "grant" else delivery.rejection
        key = (what.request_id, what.attempt)
        asked = self.asked.get(key)
        wanted = asked is not None and (not asked.endings or key in self._started)
        if asked is not None and wanted and key not in self._started:
            if isinstance(what, wire.Rejection):
                self._end(asked, wire.Refused.Reason.Name(what.refused.reason))
            else:
                self._started.add(key)
                asked.granted_ms, asked.grant = self.clock.now_ms(), what
                task = asyncio.create_task(self._stream(asked, what))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        return wire.GrantAck(wanted=wanted).SerializeToString()

    async def _stream(self, asked: Asked, grant: wire.Grant) -> None:
        node, name = self.nodes[grant.placements[0].node_id], asked.request.model
        outcome = vocabulary_pb2.OUTCOME_DONE
        broken = name in node.dead
        request_id = asked.request.request_id
        if broken or name not in node.ready:
            outcome = vocabulary_pb2.OUTCOME_FAILED
        else:
            node.now_running[name] += 1
            try:
                await self.clock.sleep_ms(asked.run_ms)
            finally:
                node.now_running[name] -= 1
        if request_id in self.broken_at_end:
            broken, outcome = True, vocabulary_pb2.OUTCOME_FAILED
        self._end(asked, "done" if outcome == vocabulary_pb2.OUTCOME_DONE else "failed")
        report = wire.Finished(
            request_id=asked.request.request_id,
            attempt=asked.request.attempt,
            pool=POOL,
            outcome=outcome,
            input_tokens=asked.request.input_tokens,
            output_tokens=asked.output_tokens,
            run_ms=asked.run_ms if request_id in self.broken_at_end or not broken else 0,
            instance_broken=broken,
            node_id=node.node_id,
        )
        self.finished.append((self.clock.now_ms(), report))
        await self.bus.publish(subjects.WORK_FINISHED, report.SerializeToString())

    def _end(self, asked: Asked, how: str) -> None:
        asked.endings.append(how)
        asked.ended_ms = self.clock.now_ms()

    def outcomes(self) -> Counter[str]:
        """How many ended in which way; every request has ended exactly once (invariant 1)."""
        for asked in self.asked.values():
            assert len(asked.endings) == 1, f"{asked.request.request_id} ended {asked.endings}"
        return Counter(asked.endings[0] for asked in self.asked.values())
