"""Random histories of a whole loader in virtual time: orders from many callers, failing models, a dying Triton.

At every step invariant 6 holds (the ledger asserts it); at the end, when all is quiet, the last order of each version
has won (case B17), the ledger holds exactly what is ready, and Triton has exactly that.
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from roundhouse.catalogue.records import Model
from roundhouse.errors import RoundhouseError
from services.loader.domain.devices import Device
from services.loader.domain.instance import State
from services.loader.domain.versions import triton_model_name
from services.loader.ports import TritonState
from tests.builders.small_node import SmallNode, small_model, small_node, source_of, version_of
from tests.fakes.clock import run_virtual

MODELS = tuple(small_model(f"m{n}", size) for n, size in enumerate((100, 150, 250, 400)))
GANGS = tuple(replace(model, tensor_parallel=1 + number % 2) for number, model in enumerate(MODELS))
DEVICES = tuple(Device(number, f"d{number}", 220, link_group=number // 2) for number in range(4))
USUAL = {"unload_ms": "1000"}  # what Triton's Python backend takes
OTHER = source_of(small_model("other"))
STEPS_MAX = 60
QUIET_S = 200  # longer than any load, unload, pause or time limit here


@dataclass(frozen=True, slots=True)
class Load:
    """Order a load; the others may leave for it."""

    model: int
    may_evict: bool
    stage_ms: int


@dataclass(frozen=True, slots=True)
class Unload:
    """Order an unload."""

    model: int


@dataclass(frozen=True, slots=True)
class Knob:
    """From now on this model loads like this."""

    model: int
    load_ms: int
    fails: bool
    bad_weights: bool


@dataclass(frozen=True, slots=True)
class Restart:
    """Triton is killed and comes back empty."""

    away_ms: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Time passes."""

    duration_ms: int


Step = Load | Unload | Knob | Restart | Wait


def history(chance: Random) -> list[Step]:
    """Mostly loads of models that crowd each other out, with just enough time in between for them to meet."""
    steps: list[Step] = []
    for _ in range(chance.randint(10, STEPS_MAX)):
        model = chance.randrange(len(MODELS))
        kind = chance.choices(("load", "unload", "knob", "restart", "wait"), weights=(30, 15, 8, 3, 44))[0]
        match kind:
            case "load":
                steps.append(Load(model, chance.random() < 0.7, chance.choice([0, 50, 2_000])))
            case "unload":
                steps.append(Unload(model))
            case "knob":
                load_ms = chance.choice([0, 100, 3_000, 15_000])
                steps.append(Knob(model, load_ms, chance.random() < 0.2, chance.random() < 0.2))
            case "restart":
                steps.append(Restart(chance.choice([0, 500, 4_000])))
            case _:
                steps.append(Wait(chance.choice([1, 40, 300, 700, 2_000, 20_000])))
    return steps


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_happens_the_node_ends_as_ordered(seed: int) -> None:
    """Invariants 6 and 7 throughout; at rest, ledger = ready instances = what Triton has. The seed repeats a run."""
    run_virtual(_history(history(Random(seed))))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_happens_devices_and_gangs_end_as_ordered(seed: int) -> None:
    """The same on two link groups of two devices, where half of the models are gangs of two: all or none, always."""
    run_virtual(_history(history(Random(seed)), GANGS, DEVICES))


async def _history(
    steps: list[Step], models: Sequence[Model] = MODELS, devices: Sequence[Device] = (Device(0, "device-0", 400),)
) -> None:
    async with small_node(models, watched=True, devices=devices) as node:
        node.library.knobs = {model.name: dict(USUAL) for model in MODELS}
        callers: list[asyncio.Task[None]] = []
        for generation, step in enumerate(steps, start=1):
            await _take(node, step, generation, callers)
            _check_always(node)
        node.control.away = False
        await asyncio.sleep(QUIET_S)
        assert all(caller.done() for caller in callers), "no caller waits for ever"
        await _check_at_rest(node)


async def _take(node: SmallNode, step: Step, generation: int, callers: "list[asyncio.Task[None]]") -> None:
    match step:
        case Load(model, may_evict, stage_ms):
            node.cache.stage_ms = stage_ms
            others = tuple(other for other in MODELS if other is not MODELS[model]) if may_evict else ()
            callers.append(asyncio.create_task(_ended(_load(node, model, generation, others))))
        case Unload(model):
            callers.append(asyncio.create_task(_ended(_unload(node, model, generation))))
        case Knob(model, load_ms, fails, bad):
            failing = {"fail_load": "told to"} if fails else {}
            node.library.knobs[MODELS[model].name] = {**USUAL, "load_ms": str(load_ms), **failing}
            node.cache.sources[MODELS[model].source_path] = OTHER if bad else source_of(MODELS[model])
            if bad:
                node.cache.cached.pop(MODELS[model].digest, None)
        case Restart(away_ms):
            node.control.restart()
            node.control.away = away_ms > 0
            await asyncio.sleep(away_ms / 1000)
            node.control.away = False
        case Wait(duration_ms):
            await asyncio.sleep(duration_ms / 1000)
    await asyncio.sleep(0)


async def _load(node: SmallNode, model: int, generation: int, others: tuple[Model, ...]) -> None:
    await node.load(MODELS[model], generation, first=others)


async def _unload(node: SmallNode, model: int, generation: int) -> None:
    await node.unload(MODELS[model], generation)


async def _ended(work: Coroutine[Any, Any, None]) -> None:
    with contextlib.suppress(RoundhouseError):
        await work


def _check_always(node: SmallNode) -> None:
    for home in node.node.residences.values():
        held = node.node.device.held_by(home.instance.version)
        if home.instance.state in (State.READY, State.DRAINING):
            assert (held.reserved, held.resident) == (0, home.device_bytes)
            site = node.node.device.site_of(home.instance.version)
            assert (len(site), site) == (home.count, home.site)
            assert len({node.node.device.devices[index].link_group for index in site}) == 1
        if home.instance.state.is_at_rest:
            assert held.total == 0


async def _check_at_rest(node: SmallNode) -> None:
    _check_always(node)
    index = await node.control.index(timeout_ms=1)
    in_triton = {name for name, state in index.items() if state is TritonState.READY}
    ready = [model for model in MODELS if node.state(model) is State.READY]
    assert in_triton == {triton_model_name(version_of(model)) for model in ready}
    assert node.device == (sum(model.device_bytes for model in ready), 0)
    assert node.node.disk.reserved == 0
    for model in MODELS:
        home = node.node.residences.get(version_of(model))
        assert home is None or home.instance.state.is_at_rest or home.instance.state is State.READY
        assert home is None or home.promised_to is None
        if home is not None and home.instance.order == "unload":
            assert home.instance.state is not State.READY
