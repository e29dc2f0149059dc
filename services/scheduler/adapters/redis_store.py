"""The fair queues in Valkey or Redis: one Lua script a verb, so each decision is atomic for all replicas.

Keys are `rh:{p:<pool>}:<layout>:…`, all made from one prefix, so a pool lives in one slot of a Redis Cluster. Time is
an argument (docs/decisions/0030): a script decides the same on a replica, in a test and in the simulator. Semantics
are those of `domain/fair_queue.py`; tests/contract/test_scheduling_store.py compares every answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis

from roundhouse.errors import Unavailable
from roundhouse.redis_edge import LuaScript
from roundhouse.subjects import encode_token
from roundhouse.vocabulary import NodeId, PoolName
from services.scheduler.adapters import redis_records as records
from services.scheduler.domain.records import (
    AttemptId,
    Cancelled,
    Drain,
    DrainDenied,
    Draining,
    Ending,
    Enqueued,
    Expired,
    Finish,
    InstanceKey,
    LoadFailure,
    Offer,
    PoolState,
    Progress,
    QueueEntry,
    RefusalReason,
    Room,
    Taken,
    Ticket,
    Turn,
    TurnDone,
    VersionKey,
)
from services.scheduler.domain.residency import Claim, ClaimDenied, Claimed, ClaimOrder, DrainOrder
from services.scheduler.domain.service import Policy

Argument = str | bytes | int | float
LAYOUT = 2  # of the values behind the keys: what a version with another one left is not read, and does no harm
BEHIND = "this process's time is behind that of others: it slept, or a machine's clock is wrong or was set back"
_PACKAGE = "services.scheduler.adapters.scripts"
_VERBS = (
    "turn",
    "cancel",
    "renew",
    "expire",
    "refuse",
    "claim_due",
    "acknowledge",
    "drain",
    "load",
    "snapshot",
)


_STEPS = {"turn": ("enqueue.lua", "seats.lua", "take.lua", "finish.lua")}


def script(verb: str) -> LuaScript:
    """The script of a verb with the steps it is made of."""
    return LuaScript(_PACKAGE, f"{verb}.lua", prelude=("state.lua", "queue.lua", *_STEPS.get(verb, ())))


def pool_prefix(pool: PoolName) -> str:
    """The prefix of every key of a pool; the braces are the hash tag of Redis Cluster."""
    return f"rh:{{p:{encode_token(pool)}}}:{LAYOUT}:"


class RedisSchedulingStore:
    """`SchedulingStore` over one Redis client, which the caller closes."""

    def __init__(
        self, redis: Redis, policy: Policy | None = None, device_time_pools: frozenset[PoolName] = frozenset()
    ) -> None:
        """The policy is the same in all pools, but some may charge time on a slot instead of tokens."""
        self._redis = redis
        policy = policy or Policy()
        self._policy = records.policy_argument(policy)
        by_time = records.policy_argument(replace(policy, device_time=True))
        self._policies = dict.fromkeys(device_time_pools, by_time)
        self._scripts = {verb: script(verb) for verb in _VERBS}

    async def _run(self, verb: str, pool: PoolName, now_ms: int, arguments: Iterable[Argument] = ()) -> Any:
        policy = self._policies.get(pool, self._policy)
        try:
            return await self._scripts[verb](self._redis, [pool_prefix(pool)], [now_ms, policy, *arguments])
        except Unavailable as error:
            if "STALE" not in str(error.__cause__):
                raise
            raise Unavailable(BEHIND) from error.__cause__

    async def turn(self, pool: PoolName, turn: Turn, now_ms: int) -> TurnDone:
        """See `SchedulingStore.turn`."""
        return records.turn_done(await self._run("turn", pool, now_ms, records.turn_arguments(turn)))

    async def enqueue(self, pool: PoolName, entry: QueueEntry, room: Room, now_ms: int) -> Enqueued:
        """See `SchedulingStore.enqueue`."""
        return (await self.turn(pool, Turn(entries=((entry, room),)), now_ms)).enqueued[0]

    async def take(self, pool: PoolName, offers: Sequence[Offer], limit: int, now_ms: int) -> Taken:
        """See `SchedulingStore.take`."""
        return (await self.turn(pool, Turn(offers=tuple(offers), limit=limit), now_ms)).taken

    async def finish(self, pool: PoolName, endings: Sequence[Ending], now_ms: int) -> tuple[Finish, ...]:
        """See `SchedulingStore.finish`."""
        return (await self.turn(pool, Turn(endings=tuple(endings)), now_ms)).finishes

    async def cancel(self, pool: PoolName, attempt: AttemptId, now_ms: int) -> Cancelled:
        """See `SchedulingStore.cancel`."""
        return Cancelled((await self._run("cancel", pool, now_ms, [attempt])).decode())

    async def renew(self, pool: PoolName, leases: Sequence[Progress], now_ms: int) -> tuple[AttemptId, ...]:
        """See `SchedulingStore.renew`."""
        arguments: list[Argument] = []
        for each in leases:
            arguments += [each.attempt, each.used.input, each.used.cached, each.used.output]
        return tuple(AttemptId(each.decode()) for each in await self._run("renew", pool, now_ms, arguments))

    async def expire(self, pool: PoolName, now_ms: int) -> Expired:
        """See `SchedulingStore.expire`."""
        refused, lapsed = await self._run("expire", pool, now_ms)
        return Expired(records.tickets(refused), records.tickets(lapsed))

    async def refuse(
        self, pool: PoolName, version: VersionKey, before_ms: int, reason: RefusalReason, message: str, now_ms: int
    ) -> tuple[Ticket, ...]:
        """See `SchedulingStore.refuse`."""
        arguments: list[Argument] = [version, before_ms, reason.value, message]
        return records.tickets(await self._run("refuse", pool, now_ms, arguments))

    async def claim_due(self, pool: PoolName, now_ms: int) -> tuple[Ticket, ...]:
        """See `SchedulingStore.claim_due`."""
        return records.tickets(await self._run("claim_due", pool, now_ms))

    async def acknowledge(self, pool: PoolName, attempts: Sequence[AttemptId], now_ms: int) -> None:
        """See `SchedulingStore.acknowledge`."""
        await self._run("acknowledge", pool, now_ms, attempts)

    async def begin_drain(self, pool: PoolName, order: DrainOrder, now_ms: int) -> Drain:
        """See `SchedulingStore.begin_drain`."""
        arguments: list[Argument] = [
            "begin",
            order.instance,
            order.version,
            order.purpose,
            order.until_ms,
            int(order.rotate),
        ]
        given, in_use, waiting = await self._run("drain", pool, now_ms, arguments)
        return Draining(in_use) if given else DrainDenied(in_use, waiting)

    async def send_drains(
        self, pool: PoolName, purpose: VersionKey, instances: Sequence[InstanceKey], until_ms: int, now_ms: int
    ) -> bool:
        """See `SchedulingStore.send_drains`."""
        return bool(await self._run("drain", pool, now_ms, ["send", purpose, until_ms, *instances]))

    async def clear_drain(
        self, pool: PoolName, instance: InstanceKey, now_ms: int, purpose: VersionKey | None = None
    ) -> None:
        """See `SchedulingStore.clear_drain`."""
        await self._run("drain", pool, now_ms, ["clear", instance, purpose or ""])

    async def claim_load(self, pool: PoolName, order: ClaimOrder, now_ms: int) -> Claim:
        """See `SchedulingStore.claim_load`."""
        claim = order.claim
        arguments: list[Argument] = [
            "claim",
            order.version,
            claim.node_id,
            claim.owner,
            claim.until_ms,
            records.claimed_amount(claim),
            order.revision,
        ]
        answer = await self._run("load", pool, now_ms, arguments)
        return Claimed() if answer == b"claimed" else ClaimDenied(stale=answer == b"stale")

    async def renew_load(self, pool: PoolName, version: VersionKey, owner: str, until_ms: int, now_ms: int) -> bool:
        """See `SchedulingStore.renew_load`."""
        return bool(await self._run("load", pool, now_ms, ["renew", version, owner, until_ms]))

    async def release_load(
        self,
        pool: PoolName,
        version: VersionKey,
        node_id: NodeId,
        owner: str,
        failure: LoadFailure | None,
        now_ms: int,
    ) -> None:
        """See `SchedulingStore.release_load`."""
        how: list[Argument] = [failure.retry_at_ms, failure.tries, failure.cause] if failure else [""]
        await self._run("load", pool, now_ms, ["release", version, node_id, owner, *how])

    async def snapshot(self, pool: PoolName, now_ms: int) -> PoolState:
        """See `SchedulingStore.snapshot`."""
        return records.pool_state(await self._run("snapshot", pool, now_ms))
