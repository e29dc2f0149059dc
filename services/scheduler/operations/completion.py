"""The end of attempts, and the pulse of running ones: `work.finished`, `work.cancel`, `work.heartbeat`.

All idempotent: a message may come twice, late, or to another replica than the one that granted.
"""

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Sequence
from itertools import islice

from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from roundhouse.vocabulary import NodeId, Outcome, PoolName
from roundhouse.wire.v1 import scheduling_pb2 as wire
from roundhouse.wire.v1 import vocabulary_pb2
from services.scheduler.domain.records import (
    AttemptId,
    Ending,
    Finish,
    Progress,
    Settled,
    Tokens,
    VersionKey,
    attempt_id,
    instance_key,
)
from services.scheduler.domain.speeds import FirstToken, Speeds
from services.scheduler.operations import deliveries
from services.scheduler.operations.broken import BrokenInstances
from services.scheduler.operations.dispatch import Dispatcher
from services.scheduler.operations.foresight import Foresight
from services.scheduler.operations.pools import DEFAULT_POOL
from services.scheduler.ports import Instruments, SchedulingStore

SETTLED_MAX = 10_000  # endings remembered: five seconds of repeats at 2,000 a second


class Completion:
    """Takes what gateways report."""

    def __init__(
        self,
        store: SchedulingStore,
        dispatcher: Dispatcher,
        clock: Clock,
        instruments: Instruments,
        broken: BrokenInstances,
        foresight: Foresight,
        speeds: Speeds,
    ) -> None:
        self._store = store
        self._broken = broken
        self._foresight = foresight
        self._speeds = speeds
        self._dispatcher = dispatcher
        self._clock = clock
        self._instruments = instruments
        self._settled: dict[AttemptId, None] = {}  # heartbeats repeat endings for seconds: these need no script

    async def finished(self, reports: Iterable[wire.Finished]) -> None:
        """Settle attempts and free their slots. Raises Unavailable; the next heartbeats repeat the reports."""
        by_pool: dict[PoolName, list[wire.Finished]] = defaultdict(list)
        for report in reports:
            if attempt_id(report.request_id, report.attempt) not in self._settled:
                by_pool[_pool(report.pool)].append(report)
        await _each([self._settle(pool, ended) for pool, ended in by_pool.items()])

    async def _settle(self, pool: PoolName, ended: list[wire.Finished]) -> None:
        broken = [report for report in ended if report.instance_broken]
        whole = [report for report in ended if not report.instance_broken]
        if broken:
            await self._broken_ones(pool, broken)
        if whole:
            self._note(pool, whole, await self._dispatcher.finish(pool, [_ending_of(report) for report in whole]))

    async def _broken_ones(self, pool: PoolName, reports: list[wire.Finished]) -> None:
        endings = [_ending(report) for report in reports]
        answers = await self._store.finish(pool, endings, self._clock.now_ms())
        for report, answer in zip(reports, answers, strict=True):
            if isinstance(answer, Settled):  # close it before its free slot is offered
                await self._broken.report(pool, NodeId(report.node_id), answer.version, report.run_ms)
                self._dispatcher.wake(pool, answer.version)
        self._note(pool, reports, answers)

    def _note(self, pool: PoolName, reports: list[wire.Finished], answers: Sequence[Finish]) -> None:
        for report, answer in zip(reports, answers, strict=True):
            self._settled[attempt_id(report.request_id, report.attempt)] = None
            if isinstance(answer, Settled):
                self._instruments.ended(pool, Outcome.from_wire(report.outcome))
                self._foresight.ended(pool, answer.version, report.run_ms)
                self._learn(report, answer.version)
        for attempt in list(islice(self._settled, max(0, len(self._settled) - SETTLED_MAX))):
            del self._settled[attempt]

    def _learn(self, report: wire.Finished, version: VersionKey) -> None:
        if report.outcome == vocabulary_pb2.OUTCOME_DONE and report.node_id:
            uncached = max(0, report.input_tokens - report.cached_tokens)
            instance = instance_key(NodeId(report.first_token_node_id or report.node_id), version)
            now_ms = self._clock.now_ms()
            self._speeds.learn(FirstToken(instance, version, uncached, report.first_token_ms), now_ms)
            self._speeds.learn_handoff(version, report.handoff_ms, now_ms)

    async def cancelled(self, cancel: wire.Cancel) -> None:
        """Take a request out of its queue; one that runs ends by its own report. Raises Unavailable."""
        attempt = attempt_id(cancel.request_id, cancel.attempt)
        await self._store.cancel(_pool(cancel.pool), attempt, self._clock.now_ms())

    async def heartbeat(self, heartbeat: wire.Heartbeat) -> None:
        """Renew the leases of one gateway and settle what it reports again. Raises Unavailable."""
        by_pool: dict[PoolName, list[Progress]] = defaultdict(list)
        for lease in heartbeat.leases:
            used = Tokens(lease.input_tokens, lease.cached_tokens, lease.output_tokens)
            by_pool[_pool(lease.pool)].append(Progress(attempt_id(lease.request_id, lease.attempt), used))
        now_ms = self._clock.now_ms()
        renewals = [self._renew(pool, leases, now_ms) for pool, leases in by_pool.items()]
        try:
            await _each([*renewals, self.finished(heartbeat.finished)])
        except Unavailable:
            self._settled.clear()  # a primary that died may have taken its last writes along: tell the next one again
            raise

    async def _renew(self, pool: PoolName, leases: Sequence[Progress], now_ms: int) -> None:
        await self._store.renew(pool, leases, now_ms)


async def _each(works: Sequence[Coroutine[None, None, None]]) -> None:
    """Do all, though some fail: each pool has its own part of the store. Raises what the first that failed raised."""
    if len(works) == 1:  # the usual case needs no task
        await works[0]
    else:
        for answer in await asyncio.gather(*works, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer


def _pool(name: str) -> PoolName:
    return PoolName(name) if name else DEFAULT_POOL


def _ending(report: wire.Finished) -> Ending:
    return Ending(
        attempt_id(report.request_id, report.attempt),
        Outcome.from_wire(report.outcome),
        Tokens(report.input_tokens, report.cached_tokens, report.output_tokens),
        report.run_ms,
    )


def _ending_of(report: wire.Finished) -> tuple[Ending, VersionKey | None]:
    ending = _ending(report)
    return ending, deliveries.version_of_lease(report.lease_id, ending.attempt)
