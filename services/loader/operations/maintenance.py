"""Takes a node out of service for people, and back: no new work, what runs ends, then nothing stands on it.

It is remembered beyond this process: a loader that is restarted on a drained node must not take work again.
"""

import asyncio
from collections.abc import AsyncIterator

from roundhouse.vocabulary import Digest, ModelName
from services.loader.domain import instance as words
from services.loader.domain.instance import State
from services.loader.domain.versions import ModelVersion, triton_model_name
from services.loader.operations.node import Node
from services.loader.operations.prestage import Prestage
from services.loader.operations.steps import Steps
from services.loader.ports import Measured, NodeMemory, Remembered


class Recollection:
    """Keeps what the next process must know, when it changed."""

    def __init__(self, node: Node, memory: NodeMemory) -> None:
        self._node = node
        self._memory = memory
        self._kept = Remembered()
        self._writing = asyncio.Lock()  # the watch and an operator's order may both have something to keep

    async def recall(self) -> None:
        """Take over what an earlier process knew. Call once, before Triton is looked at."""
        self._kept = await self._memory.recall()
        self._node.maintenance = self._kept.maintenance
        self._node.dead = set(self._kept.dead)
        self._node.loaded_before = {
            triton_model_name(ModelVersion(model.name, model.digest)): model for model in self._kept.loaded
        }
        self._node.measured = {
            (ModelVersion(ModelName(each.model), Digest(each.digest)), each.devices): each.bytes
            for each in self._kept.measured
        }

    async def keep(self) -> None:
        """Write it if it changed. Raises Unavailable."""
        async with self._writing:
            now = self._now()
            if now != self._kept:
                await self._memory.keep(now)
                self._kept = now

    def _now(self) -> Remembered:
        measured = [
            Measured(version.model, version.digest, devices, size)
            for (version, devices), size in self._node.measured.items()
        ]
        loaded = self._node.loaded_before | {
            home.triton_name: home.model
            for home in self._node.residences.values()
            if home.instance.state in (State.READY, State.DRAINING)
        }
        return Remembered(
            self._node.maintenance,
            tuple(sorted(self._node.dead)),
            tuple(sorted(measured)),
            tuple(loaded[name] for name in sorted(loaded)),
        )


class Maintenance:
    """Begin, follow, end."""

    def __init__(self, node: Node, steps: Steps, prestage: Prestage, recollection: Recollection) -> None:
        self._node = node
        self._steps = steps
        self._prestage = prestage
        self._recollection = recollection

    async def begin(self, reason: str) -> None:
        """Take no new work, and unload everything once its requests have ended. Idempotent. Raises Unavailable."""
        self._node.maintenance = reason
        self._node.tell()
        self._unload_all()  # before anything that is awaited: a caller that leaves stops nothing
        await self._recollection.keep()
        await self._prestage.stop()

    async def end(self) -> None:
        """Take work again; nothing is loaded by this. Idempotent. Raises Unavailable."""
        self._node.maintenance = ""
        await self._recollection.keep()
        self._node.tell()

    async def until_empty(self) -> AsyncIterator[None]:
        """Yields at each change until nothing is on the device, and once more then. Ends early if it is ended."""
        while self._node.maintenance:
            changed = self._node.changes.next()
            yield
            if all(home.instance.state.is_at_rest for home in self._node.residences.values()):
                return
            self._unload_all()
            await changed.wait()

    def _unload_all(self) -> None:
        for version, home in list(self._node.residences.items()):
            if home.instance.state.is_at_rest or home.instance.order is words.Order.UNLOAD:
                continue
            home.reason = "maintenance"
            self._steps.take(version, words.UnloadCommanded(home.instance.generation + 1))
            if home.staging is not None and not home.instance.wanted:
                home.staging.cancel()
