"""Why requests wait, as this replica's last plan of each pool says: for logs, the audit stream, a metric and people."""

from collections import Counter
from dataclasses import dataclass

import structlog

from roundhouse.vocabulary import PoolName
from roundhouse.wire.v1 import scheduling_pb2 as wire
from services.scheduler.domain.expectation import expect
from services.scheduler.domain.plans import Deferred, Plan, PoolView, ResidencyPolicy, Wait
from services.scheduler.domain.records import VersionKey, model_of, owner_of
from services.scheduler.operations.orders import wire_version
from services.scheduler.operations.pools import Pools
from services.scheduler.ports import AuditTrail, Instruments

log = structlog.get_logger(__name__)

TELL_AFTER_MS = 5_000  # a wait with one reason that lasts this long goes into the audit stream, once; a guess


@dataclass(slots=True)
class _Known:
    deferred: Deferred
    since_ms: int
    told: bool = False


class WaitBook:
    """The reasons of all pools of one process."""

    def __init__(self, pools: Pools, instruments: Instruments, audit: AuditTrail, policy: ResidencyPolicy) -> None:
        self._pools = pools
        self._instruments = instruments
        self._audit = audit
        self._policy = policy
        self._known: dict[PoolName, dict[VersionKey, _Known]] = {}

    async def note(self, pool: PoolName, view: PoolView, decided: Plan, now_ms: int, *, actor: str) -> None:
        """Take a plan in; logs what changed and tells what has lasted."""
        before, now = self._known.get(pool, {}), dict[VersionKey, _Known]()
        for each in (*decided.deferred, *decided.busy):
            known = before.get(each.version)
            if known is None or known.deferred.why is not each.why:
                known = _Known(each, now_ms)
                log.info("demand_waits", pool=pool, model=model_of(each.version), why=each.why, reason=each.reason)
            known.deferred = each
            now[each.version] = known
        self._known[pool] = now
        self._instruments.waiting(pool, _requests_by_reason(view, now))
        for known in now.values():
            if not known.told and known.deferred.why is not Wait.SLOTS and now_ms - known.since_ms >= TELL_AFTER_MS:
                known.told = True
                await self._tell(pool, known.deferred, actor)

    async def _tell(self, pool: PoolName, deferred: Deferred, actor: str) -> None:
        await self._audit.record(
            "wait",
            actor=actor,
            subject=model_of(deferred.version),
            reason=deferred.reason,
            details={"pool": pool, "why": deferred.why.value},
        )

    def explain(self, request: wire.ExplainRequest, now_ms: int) -> wire.ExplainReply:
        """Who waits, and why, in one pool or in all, for one model or for all."""
        reply = wire.ExplainReply()
        for pool in sorted(self._pools.names()):
            if request.pool in ("", pool):
                reply.waiting.extend(self._explain(pool, request.model, now_ms))
        return reply

    def _explain(self, pool: PoolName, model: str, now_ms: int) -> list[wire.WaitingModel]:
        view = self._pools.view(pool)
        counts: Counter[VersionKey] = Counter()
        oldest: dict[VersionKey, int] = {}
        for depth in view.state.depths:
            counts[depth.version] += depth.waiting
            oldest[depth.version] = min(depth.oldest_ms, oldest.get(depth.version, now_ms))
        return [
            self._say(view, pool, version, waiting, now_ms - oldest[version], now_ms)
            for version, waiting in sorted(counts.items())
            if model in ("", model_of(version))
        ]

    def _say(
        self, view: PoolView, pool: PoolName, version: VersionKey, waiting: int, oldest_ms: int, now_ms: int
    ) -> wire.WaitingModel:
        known, spec = self._known.get(pool, {}).get(version), view.specs.get(version)
        expected = expect(view, spec, self._policy, now_ms) if spec is not None else None
        why, reason = (known.deferred.why, known.deferred.reason) if known else (None, "")
        if expected is not None and known is None:
            why, reason = expected.why, expected.reason
        return wire.WaitingModel(
            pool=pool,
            version=wire_version(version),
            owner=owner_of(version),
            waiting=waiting,
            oldest_ms=max(0, oldest_ms),
            reason=why.value if why else "",
            detail=reason,
            estimated_start_ms=expected.start_ms if expected is not None else 0,
        )


def _requests_by_reason(view: PoolView, known: dict[VersionKey, _Known]) -> dict[Wait, int]:
    counts = dict.fromkeys(Wait, 0)
    for depth in view.state.depths:
        if depth.version in known:
            counts[known[depth.version].deferred.why] += depth.waiting
    return counts
