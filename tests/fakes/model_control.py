"""Triton's model control in memory. Passes tests/contract/test_model_control.py as the real one does.

Knobs come with the package, as Triton parameters of its configuration: `load_ms`, `fail_load` (a text), `unload_ms`.
Faults are set by hand: `hung`, `away`, `restart()`.
"""

import asyncio
import json
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from engines.placement import DEVICES_PARAMETER, placement_of
from roundhouse.clock import Clock
from roundhouse.errors import DeadlinePassed, EngineFailed, Unavailable
from services.loader.ports import LoadPackage, PlacedModel, TritonState


@dataclass(slots=True)
class _Model:
    state: TritonState
    unload_ms: int = 0
    running: int = 0
    devices: str = ""


class FakeModelControl:
    """`ModelControl` with the behaviour of Triton that matters here."""

    def __init__(self, clock: Clock) -> None:
        self.hung = False
        self.away = False
        self.loads: list[str] = []
        """Names of the loads that the backend really did, in order."""
        self.unloads: list[str] = []
        self._clock = clock
        self._models: dict[str, _Model] = {}
        self._work: set[asyncio.Task[None]] = set()

    async def probe(self, *, timeout_ms: int) -> None:
        """See `ModelControl.probe`."""
        await self._answer(timeout_ms)

    async def index(self, *, timeout_ms: int) -> Mapping[str, TritonState]:
        """See `ModelControl.index`."""
        await self._answer(timeout_ms)
        return {name: model.state for name, model in self._models.items()}

    async def load(self, name: str, package: LoadPackage, *, timeout_ms: int) -> None:
        """See `ModelControl.load`."""
        await self._answer(timeout_ms)
        known = self._models.get(name)
        if known is not None and known.state is TritonState.READY:
            return
        await self._wait_for(self._spawn(self._load(name, _knobs(package))), timeout_ms)

    async def unload(self, name: str, *, timeout_ms: int) -> None:
        """See `ModelControl.unload`."""
        await self._answer(timeout_ms)
        model = self._models.get(name)
        if model is None or model.state in (TritonState.UNAVAILABLE, TritonState.UNLOADING):
            return
        if model.state is TritonState.LOADING:  # Triton answers when the load is over
            await self._wait_for(self._spawn(self._unload_later(name)), timeout_ms)
            return
        self._begin_unload(name, model)

    async def placed_on(self, name: str, *, timeout_ms: int) -> PlacedModel:
        """See `ModelControl.placed_on`."""
        await self._answer(timeout_ms)
        model = self._models.get(name)
        if model is None or model.state is TritonState.UNAVAILABLE:
            raise EngineFailed("no such model", code="load_failed")
        found = placement_of(model.devices)
        return PlacedModel(found.uuids, found.alone_for)

    async def forget(self, name: str) -> None:
        """See `ModelControl.forget`."""
        model = self._models.get(name)
        if model is not None and model.state is TritonState.UNAVAILABLE:
            del self._models[name]

    def begin_request(self, name: str) -> None:
        """A request runs on the model; it holds up an unload."""
        self._models[name].running += 1

    def end_request(self, name: str) -> None:
        """One request ended."""
        self._models[name].running -= 1

    def restart(self) -> None:
        """A new server process: nothing is loaded."""
        self._models.clear()
        for work in self._work:
            work.cancel()
        self.hung = self.away = False

    async def _answer(self, timeout_ms: int) -> None:
        await asyncio.sleep(0)
        if self.away:
            raise Unavailable("Triton is away")
        if self.hung:
            await self._clock.sleep_ms(timeout_ms)
            raise DeadlinePassed(f"Triton did not answer within {timeout_ms} ms")

    async def _load(self, name: str, knobs: Mapping[str, str]) -> None:
        model = self._models[name] = _Model(
            TritonState.LOADING, int(knobs.get("unload_ms", "0")), devices=knobs.get(DEVICES_PARAMETER, "")
        )
        self.loads.append(name)
        await self._clock.sleep_ms(int(knobs.get("load_ms", "0")))
        if "fail_load" in knobs:
            model.state = TritonState.UNAVAILABLE
            raise EngineFailed(knobs["fail_load"], code="load_failed")
        model.state = TritonState.READY

    def _begin_unload(self, name: str, model: _Model) -> None:
        model.state = TritonState.UNLOADING
        self.unloads.append(name)
        self._spawn(self._unload(model))

    async def _unload(self, model: _Model) -> None:
        while model.running:
            await self._clock.sleep_ms(5)
        await self._clock.sleep_ms(model.unload_ms)
        model.state = TritonState.UNAVAILABLE

    async def _unload_later(self, name: str) -> None:
        while self._models[name].state is TritonState.LOADING:
            await self._clock.sleep_ms(5)
        if self._models[name].state is TritonState.READY:
            self._begin_unload(name, self._models[name])

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._done)
        return task

    async def _wait_for(self, work: "asyncio.Task[None]", timeout_ms: int) -> None:
        """The server goes on when its caller leaves; a caller is told when the server dies."""
        ended, _ = await asyncio.wait({work}, timeout=timeout_ms / 1000)
        if not ended:
            raise DeadlinePassed(f"Triton did not answer within {timeout_ms} ms")
        if work.cancelled():
            raise Unavailable("Triton is away")
        work.result()

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._work.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waited has it; nobody else needs to


def _knobs(package: LoadPackage) -> dict[str, str]:
    parameters = json.loads(package.config or "{}").get("parameters", {})
    return {name: value["string_value"] for name, value in parameters.items()}
