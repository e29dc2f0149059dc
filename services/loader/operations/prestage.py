"""Brings weights nearer without loading them: from the source to disk, or on into host memory.

For what is expected soon: a load that comes then costs only the way to the device. An order goes on when its caller
leaves; a load or a pre-warm of the same weights joins it, an unload of the version ends it.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from roundhouse.clock import Clock
from roundhouse.errors import Conflict, DeadlinePassed, Unavailable
from services.loader.domain.instance import State
from services.loader.domain.staging_priority import Priority
from services.loader.domain.versions import ModelVersion
from services.loader.operations.caches import CacheTiers
from services.loader.operations.node import Node, Residence, weights_of
from services.loader.operations.progress import Progress, ProgressGauge
from services.loader.ports import ModelLibrary


@dataclass(frozen=True, slots=True)
class StageOrder:
    """EnsureLoaded with the target HOST or DISK."""

    version: ModelVersion
    to_host: bool
    deadline_ms: int = 0  # from now; 0 = none
    reason: str = ""


class Prestage:
    """Takes orders and follows them."""

    def __init__(
        self, node: Node, caches: CacheTiers, library: ModelLibrary, gauge: ProgressGauge, clock: Clock
    ) -> None:
        self._node = node
        self._caches = caches
        self._library = library
        self._gauge = gauge
        self._clock = clock
        self._running: dict[ModelVersion, asyncio.Task[None]] = {}

    async def ensure_staged(self, order: StageOrder) -> AsyncIterator[Progress]:
        """Bring the weights there; yields progress and ends with STAGED. Idempotent; cancelling stops nothing.

        Raises NotFound, InvalidInput, CapacityExhausted, Conflict (an unload came), DeadlinePassed, Unavailable."""
        if self._node.draining or self._node.maintenance:
            raise Unavailable(self._node.not_accepting_reason)
        home = self._node.settle_in(order.version, self._library.find(order.version))
        work = self._work(home, order)
        last: Progress | None = None
        deadline_ms = self._clock.monotonic_ms() + order.deadline_ms if order.deadline_ms else None
        while not work.done():
            changed = self._node.progress.next()
            progress = self._gauge.staging(order.version.digest, home.weights_bytes)
            if progress != last:
                yield progress
                last = progress
            await self._either(changed, work, deadline_ms)
        if work.cancelled():
            raise Conflict("a newer order unloads it")
        work.result()
        size = self._node.disk.held_by(order.version.digest).total
        yield Progress(State.STAGED, size, size, 0)

    def cancel(self, version: ModelVersion) -> None:
        """An unload came: the weights are not wanted here any more. Idempotent."""
        work = self._running.get(version)
        if work is not None:
            work.cancel()

    async def stop(self) -> None:
        """End all of them; the next process goes on where the disk is."""
        running = list(self._running.values())
        for work in running:
            work.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _work(self, home: Residence, order: StageOrder) -> "asyncio.Task[None]":
        priority = Priority.of_reason(order.reason)
        known = self._running.get(order.version)
        if known is not None and not known.cancelling():
            self._gauge.promote(order.version.digest, priority)
            if not order.to_host:
                return known
        work = asyncio.create_task(
            self._caches.stage(weights_of(home.model, self._library), priority, to_host=order.to_host), name="prestage"
        )
        self._running[order.version] = work
        work.add_done_callback(lambda ended: self._ended(order.version, ended))
        return work

    def _ended(self, version: ModelVersion, work: "asyncio.Task[None]") -> None:
        if self._running.get(version) is work:
            del self._running[version]
        if not work.cancelled():
            work.exception()  # whoever waited has it; nobody else needs to

    async def _either(self, changed: asyncio.Event, work: "asyncio.Task[None]", deadline_ms: int | None) -> None:
        left_ms = None if deadline_ms is None else deadline_ms - self._clock.monotonic_ms()
        if left_ms is not None and left_ms <= 0:
            raise DeadlinePassed("the deadline passed: it is not staged yet")
        waiting = asyncio.create_task(changed.wait())
        try:
            await asyncio.wait(
                {waiting, work},
                timeout=None if left_ms is None else left_ms / 1000,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            waiting.cancel()
