"""Applies what the domain decides: one step of one version's life, its effect on the ledgers, and what to do next.

Every change of an instance goes through `Steps.take`, which awaits nothing, so the instance and the ledgers change
together. Commands run as tasks of the owner's task group; the life's states keep them to one a version (invariant 7).
It performs nothing itself: `perform` does.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from roundhouse.clock import Clock
from services.loader.domain import instance as words
from services.loader.domain.instance import Command, Event, Instance, Moved, State, Step
from services.loader.domain.life import advance
from services.loader.domain.sites import Placed
from services.loader.domain.versions import ModelVersion
from services.loader.operations.node import Node, Residence

log = structlog.get_logger(__name__)

Performer = Callable[[ModelVersion, Command], Awaitable[None]]
"""Does what a command says and takes the event it ends in."""


class Steps:
    """The only writer of instances, and of the devices' ledger with them."""

    def __init__(self, node: Node, clock: Clock, tasks: asyncio.TaskGroup) -> None:
        self._node = node
        self._clock = clock
        self._tasks = tasks
        self._performer: Performer | None = None
        self._running: set[asyncio.Task[None]] = set()

    def performed_by(self, performer: Performer) -> None:
        """Who does the commands. Call once, before the first step."""
        self._performer = performer

    def take(self, version: ModelVersion, event: Event) -> Step:
        """Apply `event` to a version that has a residence, and start what is to be done next."""
        home = self._node.residences[version]
        before = home.instance
        step = advance(before, event, self._clock.now_ms())
        if isinstance(step, Moved) and step.instance != before:
            home.instance = step.instance
            self._keep_ledger(home, before)
            if _shows(before) != _shows(step.instance):
                log.info("instance_moved", model=version.model, digest=version.digest, **_shows(step.instance))
                self._node.tell()
            if step.command is not None:
                self._start(version, step.command)
        return step

    def promise(self, home: Residence, placed: Placed) -> None:
        """Reserve what is free of its site for `home`, and promise it what leaves, which takes no new request now."""
        heir = home.instance.version
        home.site = placed.site
        self._reserve(home)
        for victim in placed.leaving:
            self._node.residences[victim].promised_to = heir
            self.take(victim, words.Claimed())

    async def settle(self, timeout_ms: int) -> None:
        """Wait until no command runs, at most `timeout_ms`, then cancel what still does. Triton keeps what it has."""
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        while self._running and (left_ms := deadline_ms - self._clock.monotonic_ms()) > 0:
            await asyncio.wait(set(self._running), timeout=left_ms / 1000)
        for task in self._running:
            task.cancel()

    def _start(self, version: ModelVersion, command: Command) -> None:
        assert self._performer is not None
        name = f"{command.value} {version.model}"
        task = self._tasks.create_task(_awaited(self._performer(version, command)), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _keep_ledger(self, home: Residence, before: Instance) -> None:
        """Bytes follow the state: committed when ready, released when gone (invariant 6)."""
        version, state = home.instance.version, home.instance.state
        if state is before.state:
            return
        if state is not State.UNLOADING:
            home.idle = False
        if state is State.READY:
            self._take_back(home)
        if state is State.READY and before.state is State.LOADING:
            self._node.device = self._node.device.commit(version)
        if state.is_at_rest or state is State.ADMITTING:  # also when it is wanted again as soon as it is gone
            self._node.device = self._node.device.release(version)
            self._keep_unfreed(home)
            self._hand_over(home)
        if state not in (State.ADMITTING, State.STAGING, State.LOADING):
            self._give_up_promises(version)

    def _keep_unfreed(self, home: Residence) -> None:
        """What its devices did not show as free is nobody's to reserve, until they do."""
        for index, size in home.unfreed.items():
            self._node.device = self._node.device.found_unaccounted(index, size)
        home.unfreed = {}

    def _take_back(self, home: Residence) -> None:
        """A newer load wants it: whoever was to get its bytes must not choose it again."""
        heir = None if home.promised_to is None else self._node.residences.get(home.promised_to)
        home.promised_to = None
        if heir is not None:
            heir.unload_first = tuple(each for each in heir.unload_first if each != home.instance.version)

    def _hand_over(self, home: Residence) -> None:
        heir = None if home.promised_to is None else self._node.residences.get(home.promised_to)
        home.promised_to = None
        if heir is not None:
            self._reserve(heir)

    def _reserve(self, home: Residence) -> None:
        self._node.device = self._node.device.reserve_up_to(home.instance.version, home.site, home.need.share)

    def _give_up_promises(self, heir: ModelVersion) -> None:
        for victim in self._node.promised_to(heir):
            victim.promised_to = None
            self.take(victim.instance.version, words.Unclaimed())


def _shows(instance: Instance) -> dict[str, object]:
    """What the mesh sees of an instance."""
    return {"state": instance.state.value, "generation": instance.generation, "reason": instance.reason}


async def _awaited(work: Awaitable[None]) -> None:
    await work
