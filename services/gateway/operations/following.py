"""A request that waits follows its model to the version that took over (case B19).

The scheduler gives back what it cannot place any more because another version is in force, and refuses a version that
it has not heard of yet. In both cases the request is submitted again for what the catalogue names now, if that reads
the prompt alike: it is token ids by then. Decision: docs/decisions/0128-permissions-and-restarts.md.
"""

from dataclasses import replace

import structlog

from roundhouse.catalogue.store import CatalogueView
from roundhouse.clock import Clock
from services.gateway.operations.accounting import Work
from services.gateway.operations.resolve_model import reads_alike

log = structlog.get_logger(__name__)

MOVES_MAX, PAUSE_MS = 40, 250  # 10 s, while catalogues and the words of nodes spread


class Following:
    """Of one request."""

    def __init__(self, catalogue: CatalogueView | None) -> None:
        self._catalogue = catalogue
        self._moves = 0

    @property
    def is_over(self) -> bool:
        """Whether it was tried often enough, or nothing is known of versions here."""
        return self._catalogue is None or self._moves == MOVES_MAX

    async def next_work(self, work: Work, clock: Clock) -> Work | None:
        """What to submit next, after a pause; None = the version in force reads prompts otherwise, or there is none."""
        assert self._catalogue is not None
        self._moves += 1
        await clock.sleep_ms(PAUSE_MS)
        model = self._catalogue.current.models.get(work.model.name)
        if model is None or not reads_alike(work.model, model):
            return None
        if model.digest == work.model.digest:
            return work
        log.info("request_moves_on", request_id=work.request_id, model=model.name, digest=model.digest)
        return replace(work, model=model, block_keys=())
