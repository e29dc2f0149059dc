"""Shows vLLM instances their adapters: a number for each content, given out at its first use.

    load:    names without adapters go into the package          Berthing.prepare
    request: the adapter is staged, checked, and gets its number   Berthing.moor
    later:   it moves between host memory and disk                 Berthing.follow
    unload:  nothing is remembered                                 Berthing.leave
    when no number is left: the instance is loaded again           Berthing.turn

vLLM opens an adapter when it first runs a request with it, which may have waited for memory; a path that is not there
ends its engine for everybody (tried, vLLM 0.32). So an adapter stays on the node's disk until every request that was
told of it has ended: `promise`. After a restart of the loader numbers are read again from the links; nobody knows then
who was promised what, so everything that has a number counts as promised anew.
"""

from pathlib import Path

import structlog

from roundhouse.catalogue.records import Engine
from roundhouse.clock import Clock
from roundhouse.errors import CapacityExhausted, Unavailable
from roundhouse.vocabulary import Digest
from services.loader.adapter_ports import BerthBoard
from services.loader.domain import instance as words
from services.loader.domain.berths import AllTaken, Berths, berths_for
from services.loader.domain.instance import State
from services.loader.operations.node import Node, Residence
from services.loader.operations.steps import Steps
from services.loader.ports import ModelLibrary

log = structlog.get_logger(__name__)

NAMES_USED_UP = "adapter-names"  # reason of a load and unload that nobody ordered
REQUEST_MS_MAX = 3_600_000  # the longest a gateway lets a request run; what an earlier process promised


class Berthing:
    """See the module."""

    def __init__(self, node: Node, board: BerthBoard, library: ModelLibrary, clock: Clock, steps: Steps) -> None:
        self._node = node
        self._steps = steps
        self._board = board
        self._library = library
        self._clock = clock
        self._berths: dict[str, Berths] = {}
        self._full: set[str] = set()
        """Instances that somebody asked for one name too many, by Triton name."""
        self._renewing: set[str] = set()
        """Of these, the ones that were told to leave."""

    async def start(self) -> None:
        """Take over what an earlier process gave out. Raises Unavailable."""
        self._berths = dict(await self._board.start())
        for berths in self._berths.values():
            for digest in berths.taken:
                self.promise(digest, REQUEST_MS_MAX)

    async def prepare(self, home: Residence) -> Berths | None:
        """New berths for a load that is about to begin; None for a model that needs none. Raises Unavailable."""
        if home.model.engine is not Engine.VLLM or not home.model.adapter_slots:
            return None
        declared = sum(adapter.base == home.model.name for adapter in self._library.adapters().values())
        berths = await self._board.open(home.triton_name, berths_for(declared), home.model.adapter_rank_max)
        self._berths[home.triton_name] = berths
        return berths

    def of(self, home: Residence) -> Berths | None:
        """The berths of an instance; None if its engine opens paths. Raises Unavailable: it was loaded without."""
        if home.model.engine is not Engine.VLLM:
            return None
        berths = self._berths.get(home.triton_name)
        if berths is None:
            raise Unavailable("the instance was loaded without room for adapters: it has to be loaded again")
        return berths

    def takes(self, home: Residence) -> bool:
        """Whether an instance takes adapters at all."""
        return home.model.engine is not Engine.VLLM or home.triton_name in self._berths

    async def moor(self, home: Residence, digest: Digest, path: Path) -> str:
        """Have an instance find an adapter; what requests call it, empty = by its path. Idempotent.

        Raises CapacityExhausted (no number is left: it is going to be loaded again), Unavailable."""
        berths = self.of(home)
        if berths is None:
            return ""
        number = berths.take(digest)
        if isinstance(number, AllTaken):
            self._full.add(home.triton_name)
            raise CapacityExhausted(f"{number.count} adapters were used since the instance was loaded: no name is left")
        await self._board.point(berths, number, path)
        return berths.called(number)

    def promise(self, digest: Digest, use_ms: int) -> None:
        """It stays on the node for so long."""
        promised = self._node.adapters.promised_until_ms
        promised[digest] = max(promised.get(digest, 0), self._clock.now_ms() + use_ms)

    async def follow(self, digest: Digest, path: Path) -> None:
        """It is to be found at another place. Raises Unavailable."""
        for name in list(self._berths):
            berths = self._berths.get(name)  # instances come and go meanwhile
            if berths is not None and digest in berths.taken:
                await self._board.point(berths, berths.taken[digest], path)

    def turn(self) -> None:
        """Have instances without names left leave, let what runs on them end, and come back with new ones.

        Requests wait at the scheduler meanwhile. What leaves for another reason does not come back for this one."""
        for home in [each for each in self._node.residences.values() if each.triton_name in self._full]:
            newer, state = home.instance.generation + 1, home.instance.state
            if home.triton_name not in self._renewing:
                if state is not State.READY or not self._node.accepting:
                    self._full.discard(home.triton_name)
                    continue
                log.warning("adapter_names_used_up", model=home.instance.version.model)
                self._renewing.add(home.triton_name)
                home.reason = NAMES_USED_UP
                self._steps.take(home.instance.version, words.UnloadCommanded(newer))
            elif state is State.UNLOADING or state.is_at_rest:
                self._full.discard(home.triton_name)
                self._renewing.discard(home.triton_name)
                home.unload_first, home.reason, home.wanted_site = (), NAMES_USED_UP, home.site
                self._steps.take(home.instance.version, words.LoadCommanded(newer))

    async def leave(self, triton_name: str) -> None:
        """The instance has gone."""
        if self._berths.pop(triton_name, None) is not None:
            await self._board.close(triton_name)
