"""Admission on a store that is slow, and on one that goes away: nobody gets another's answer, nothing stays counted."""

import asyncio
import random
from typing import Any
from urllib.parse import urlsplit

import pytest

from roundhouse.catalogue.records import Limits
from roundhouse.errors import LimitExceeded, Unavailable
from roundhouse.redis_edge import open_redis
from roundhouse.vocabulary import KeyId, RequestId, TenantId
from services.gateway.adapters import redis_names
from services.gateway.adapters.admin_key_registry import RedisKeyRegistry
from services.gateway.adapters.admission import RedisAdmission
from services.gateway.adapters.key_directory import RedisKeyDirectory
from services.gateway.domain.keys import INFERENCE, KeyRecord, key_hash
from services.gateway.domain.limits import POINTS_PER_UNIT
from services.gateway.ports import Admitted, Caller
from tests.fakes.clock import ManualClock
from tests.infra import FaultyServer
from tests.integration.catalogue.delay_proxy import delayed

CONNECTIONS_MAX = 16
REQUEST_LIMITS = {"t1": 1_000_000, "t2": 2_000_000}  # far apart: an answer shows whose limit it was made with
KEYS = {"t1": "rh-" + "1" * 43, "t2": "rh-" + "2" * 43}


def caller(tenant: str) -> Caller:
    """The only key of a tenant."""
    return Caller(TenantId(tenant), KeyId(f"key-{tenant}"), frozenset({INFERENCE}), key_hash(KEYS[tenant]))


async def make_keys(registry: RedisKeyRegistry) -> None:
    """One key for each tenant."""
    for tenant in KEYS:
        one = caller(tenant)
        await registry.add(KeyRecord(one.key_id, one.tenant_id, one.key_hash, one.scopes, "", 0, 0))


@pytest.mark.timeout(60)
async def test_cancelled_calls_give_nobody_anothers_answer(redis_url: str) -> None:
    """B37: 200 requests of two tenants over a 100 ms line, half cancelled after 0 to 150 ms, then 200 more in turn.

    0 answers carry the other's limit or tenant; each tenant's counter is its own admitted requests; the pool holds."""
    if "+cluster" in redis_url:
        pytest.skip("the line to one server is delayed; for a cluster see tests/integration/test_redis_cluster.py")
    chance = random.Random(37)
    address = urlsplit(redis_url)
    direct = open_redis(redis_url)
    await make_keys(RedisKeyRegistry(direct))
    clock = ManualClock()  # time stands still, so nothing drains and counters are exact
    admitted: dict[str, list[Admitted]] = {"t1": [], "t2": []}
    async with delayed(str(address.hostname), int(address.port or 0), 0.1) as (proxy, port):
        slow = open_redis(f"redis://127.0.0.1:{port}/0", connections_max=CONNECTIONS_MAX)
        admission = RedisAdmission(slow, clock=clock)
        directory = RedisKeyDirectory(slow, clock)

        async def one(number: int, tenant: str) -> None:
            who = await directory.identify(KEYS[tenant], fresh=True)
            assert who.tenant_id == tenant
            limits = Limits(requests_per_minute=REQUEST_LIMITS[tenant])
            answer = await admission.admit(who, RequestId(f"r{number}"), limits, input_tokens=0, reserve_tokens=0)
            assert answer.remaining_requests is not None
            assert REQUEST_LIMITS[tenant] - 300 <= answer.remaining_requests < REQUEST_LIMITS[tenant]
            admitted[tenant].append(answer)

        for start in range(0, 200, 20):
            tasks = [asyncio.create_task(one(start + n, "t1" if n % 2 else "t2")) for n in range(20)]
            for task in tasks[::2] if start % 40 else tasks[1::2]:
                asyncio.get_running_loop().call_later(chance.uniform(0, 0.15), task.cancel)
            done = await asyncio.gather(*tasks, return_exceptions=True)
            unexpected = [answer for answer in done if answer is not None and not _is_cancelled(answer)]
            assert unexpected == []
        await admission.aclose()
        for start in range(200, 400, 20):  # 20 × 2 calls × 0.2 s ÷ 16 connections = 0.5 s, within the pool's 2 s
            done = await asyncio.gather(*(one(start + n, "t1" if n % 2 else "t2") for n in range(20)))
            assert done == [None] * 20
        await admission.aclose()
        assert proxy.open_max <= 2 * CONNECTIONS_MAX  # a closed connection lingers in the proxy for its delay
        assert proxy.open <= CONNECTIONS_MAX + 1  # the pool, and the one that scripts share
        await slow.aclose()
    for tenant, answers in admitted.items():
        await _assert_counted(direct, tenant, answers)
    await direct.aclose()


def _is_cancelled(answer: object) -> bool:
    return isinstance(answer, asyncio.CancelledError)


async def _assert_counted(redis: Any, tenant: str, answers: list[Admitted]) -> None:
    points = int(await redis.hget(redis_names.meters(TenantId(tenant)), "requests"))
    assert points == len(answers) * POINTS_PER_UNIT
    leases = await redis.zrange(redis_names.concurrency_leases(TenantId(tenant)), 0, -1)
    assert {lease.decode() for lease in leases} == {answer.ticket for answer in answers}


async def test_a_lost_store_refuses_and_a_restarted_one_goes_on(valkey_server: FaultyServer) -> None:
    """B09: while the store is away nothing is admitted; after a restart without memory of scripts limits hold again."""
    redis = open_redis(valkey_server.url)
    await make_keys(RedisKeyRegistry(redis))
    admission = RedisAdmission(redis)
    limits = Limits(requests_per_minute=2)

    async def admit(number: int) -> Admitted:
        return await admission.admit(caller("t1"), RequestId(f"r{number}"), limits, input_tokens=0, reserve_tokens=1)

    held = await admit(1)
    valkey_server.kill()
    with pytest.raises(Unavailable):
        await admit(2)
    with pytest.raises(Unavailable):
        await admission.settle(held, used_tokens=1)
    with pytest.raises(Unavailable):
        await admission.renew([held])
    await admission.aclose()
    valkey_server.restart()
    await redis.script_flush()
    await admission.renew([held])  # by hash to a server that does not know the script
    await make_keys(RedisKeyRegistry(redis))
    answers = await asyncio.gather(*(admit(number) for number in range(10, 20)), return_exceptions=True)
    assert sum(isinstance(answer, Admitted) for answer in answers) <= 2
    assert sum(isinstance(answer, LimitExceeded) for answer in answers) >= 8
    await redis.aclose()
