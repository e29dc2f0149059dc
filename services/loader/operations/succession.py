"""A new version takes over from the one that serves, on this node, without a gap where there is room for both.

    1. the catalogue names another version of a model that stands here
    2. its weights are staged beside the old one's service; bad weights end it here, and the old one goes on
    3. it is loaded: beside the old one if there is room, else in its place (the one gap there can be: a load from host
       memory, announced `NOTICE_MS` before and told in the audit stream; requests wait at the scheduler meanwhile)
    4. gateways send to it once it is ready; the old one stays for `KEEP_MS`, for what was queued for it, and leaves;
       what runs on it ends on it
    5. if it cannot be loaded and the old one had to go, the old one comes back

It decides nothing for models that do not stand here: those are loaded in their new version when somebody asks.
"""

import asyncio

import structlog

from roundhouse.catalogue.records import Model
from roundhouse.clock import Clock
from roundhouse.errors import NotFound, RoundhouseError
from services.loader.domain import instance as words
from services.loader.domain.instance import Moved, State
from services.loader.domain.sites import Need, fits_beside, sites
from services.loader.domain.staging_priority import Priority
from services.loader.domain.versions import ModelVersion
from services.loader.operations.caches import CacheTiers
from services.loader.operations.node import Node, Residence, weights_of
from services.loader.operations.steps import Steps
from services.loader.ports import AuditNote, AuditTrail, ModelLibrary

log = structlog.get_logger(__name__)

KEEP_MS = 30_000  # requests queued for the old version find it; gateways switch within a second. A guess.
NOTICE_MS = 1_500  # longer than a node's state takes to be heard, and what was sent before it to be granted
RETRY_MS = 15_000  # after weights that could not be staged, or no room: somebody has to mend something first
NEW_VERSION, RESTORED, SUPERSEDED = "new-version", "restored", "superseded"
"""Reasons of loads and unloads that nobody ordered."""


class Succession:
    """Runs `turn` after each look at Triton."""

    def __init__(
        self, node: Node, steps: Steps, caches: CacheTiers, library: ModelLibrary, audit: AuditTrail, clock: Clock
    ) -> None:
        self._node = node
        self._steps = steps
        self._caches = caches
        self._library = library
        self._audit = audit
        self._clock = clock
        self._staging: dict[ModelVersion, asyncio.Task[None]] = {}
        self._retry_ms: dict[ModelVersion, int] = {}

    async def turn(self) -> None:
        """Take each version change one step further. Raises nothing that is expected."""
        if not self._library.is_known or not self._node.accepting:
            return
        current = {version.model: version for version in self._library.versions().values()}
        for old, home in list(self._node.residences.items()):
            new = current.get(old.model)
            if new is None or new == old:
                home.succeeded_by = None
            elif home.instance.state is State.READY:
                home.succeeded_by = new
                self._succeed(home, new)
            elif home.succeeded_by == new and home.instance.state.is_at_rest:
                self._restore(home, new)

    async def stop(self) -> None:
        """End what is being staged. Idempotent."""
        running = list(self._staging.values())
        for work in running:
            work.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _succeed(self, old: Residence, new: ModelVersion) -> None:
        heir = self._node.residences.get(new)
        now_ms = self._clock.now_ms()
        if heir is not None and heir.instance.state is State.READY:
            if now_ms - heir.instance.since_ms >= KEEP_MS:
                old.reason, old.succeeded_by = SUPERSEDED, None
                self._steps.take(old.instance.version, words.UnloadCommanded(old.instance.generation + 1))
            return
        moving = heir is not None and not heir.instance.state.is_at_rest
        if old.leaving and not moving and new not in self._staging:
            old.leaving = False  # it stays after all, or is back
            self._node.tell()
        if moving or new in self._staging or now_ms < self._retry_ms.get(new, 0):
            return
        failed = heir is not None and heir.instance.state is State.FAILED
        if heir is not None and failed and not fits_beside(self._node.device, heir.need, self._node.alone()):
            return  # the old one made room for it once, in vain: not again
        try:
            model = self._library.find(new)
        except NotFound:
            return  # the catalogue changed again between the two looks
        work = asyncio.create_task(self._bring(old, new, model), name="new version")
        self._staging[new] = work
        work.add_done_callback(lambda _: self._staging.pop(new, None))

    async def _bring(self, old: Residence, new: ModelVersion, model: Model) -> None:
        """Stage first, so that a gap, if there has to be one, is only the load."""
        try:
            await self._caches.stage(weights_of(model, self._library), Priority.PREWARM)
            size = await self._library.device_bytes(model)
        except RoundhouseError as error:
            self._give_up(new, error.message)
            return
        await self._give_notice(old, Need.of(new, size, max(1, model.tensor_parallel), old.alone_for))
        if old.instance.state is not State.READY:
            return
        heir = self._node.settle_in(new, model)
        heir.unload_first, heir.reason = (old.instance.version,), NEW_VERSION
        heir.wanted_site, heir.alone_for = (), old.alone_for
        self._retry_ms[new] = self._clock.now_ms() + RETRY_MS  # if it is refused: for lack of room, or by an operator
        step = self._steps.take(new, words.LoadCommanded(heir.instance.generation))
        log.info("new_version_loads", model=new.model, digest=new.digest, taken=isinstance(step, Moved))

    async def _give_notice(self, old: Residence, need: Need) -> None:
        """If the old one has to make room: say so before it takes no more, so that nobody is on his way to it then."""
        if fits_beside(self._node.device, need, self._node.alone()) or not any(sites(self._node.device, need)):
            return
        old.leaving = True
        self._node.tell()
        details = {"made_room_for": "its new version"}
        self._audit.record(AuditNote("version-gap", old.instance.version, NEW_VERSION, details))
        await self._clock.sleep_ms(NOTICE_MS)

    def _give_up(self, new: ModelVersion, reason: str) -> None:
        self._retry_ms[new] = self._clock.now_ms() + RETRY_MS
        log.warning("new_version_not_staged", model=new.model, digest=new.digest, reason=reason)
        self._audit.record(AuditNote("new-version-failed", new, reason, {"serving": "the old version"}))

    def _restore(self, old: Residence, new: ModelVersion) -> None:
        """It made room for one that could not be loaded: it comes back, once that one is gone."""
        heir = self._node.residences.get(new)
        if heir is None or heir.instance.state is not State.FAILED or old.instance.order is words.Order.UNLOAD:
            return
        old.unload_first, old.reason, old.wanted_site = (), RESTORED, old.site
        if isinstance(self._steps.take(old.instance.version, words.LoadCommanded(old.instance.generation)), Moved):
            self._audit.record(AuditNote("restored", old.instance.version, heir.instance.reason))
