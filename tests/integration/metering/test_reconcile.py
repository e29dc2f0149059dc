"""The comparison on real streams, store and ledger: injected differences are reported, by HTTP and by the command."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from roundhouse import subjects
from roundhouse.event_bus import NatsBus
from roundhouse.redis_edge import open_redis
from roundhouse.settlements import leases_key, settlements_key
from roundhouse.wire.v1 import usage_pb2
from services.metering.adapters.usage_wire import encode_event
from tests.builders.usage import usage_facts
from tests.integration.metering.conftest import MeteringProcess, emit, wait_for
from tests.integration.metering.test_budgets import now_ms, published


async def settle(redis_url: str, *requests: str, tokens: int = 1_200) -> None:
    """What a gateway writes when requests end."""
    redis = open_redis(redis_url)
    for name in requests:
        await redis.xadd(settlements_key("t1"), {"r": name, "k": "s", "t": tokens})
    await redis.aclose()


def found(metering: MeteringProcess, since_ms: int) -> list[tuple[str, str]]:
    """(kind, request) of each difference since an instant."""
    answer = metering.get("/v1/differences", **{"from": str(since_ms), "to": str(now_ms() + 1)})
    assert answer["checked"]["requests"] >= 10, answer
    return [(each["kind"], each["request_id"]) for each in answer["differences"]]


async def test_injected_differences_are_reported_exactly(
    metering: MeteringProcess, bus: NatsBus, redis_url: str
) -> None:
    """Ten requests agree; then a lost event, a lost settlement, a lost row and a forged record are each named."""
    since_ms = now_ms() - 1
    metering.start()
    await asyncio.to_thread(wait_for, metering.ready, within_s=30, what="ready")
    names = [f"r{number}" for number in range(10)]
    await emit(bus, *(usage_facts(name, time_ms=now_ms()) for name in names))
    await settle(redis_url, *names)
    await asyncio.to_thread(wait_for, lambda: rows(metering) == 10, within_s=30, what="ten rows")
    await asyncio.to_thread(wait_for, lambda: published(metering), within_s=30, what="all published")
    assert await asyncio.to_thread(found, metering, since_ms) == []

    await settle(redis_url, "lost-event")
    await emit(bus, usage_facts("lost-settlement", time_ms=now_ms()))
    await settle(redis_url, "lost-row")
    lost_row = encode_event(usage_facts("lost-row", time_ms=now_ms(), cached_tokens=5_000))  # more than the input
    await bus.publish_durable(subjects.usage("t1"), lost_row.SerializeToString(), message_id="lost-row/1")
    await asyncio.to_thread(wait_for, lambda: rows(metering) == 11, within_s=30, what="eleven rows")
    await asyncio.to_thread(wait_for, lambda: published(metering), within_s=30, what="all published")
    event = encode_event(usage_facts("forged", time_ms=now_ms()))
    record = usage_pb2.RatedRecord(sequence=500, event=event, amount="1")
    await bus.publish_durable(subjects.billing("t1"), record.SerializeToString(), message_id="forged")
    redis = open_redis(redis_url)
    await redis.zadd(leases_key("t1"), {"died": 1})
    await redis.aclose()
    assert await asyncio.to_thread(found, metering, since_ms) == [
        ("no_settlement", "forged"),
        ("record_without_row", "forged"),
        ("no_event", "lost-event"),
        ("no_row", "lost-row"),
        ("no_settlement", "lost-settlement"),
    ]

    erase = f"http://127.0.0.1:{metering.http_port}/v1/tenants/t1/erase"
    assert (await asyncio.to_thread(httpx.post, erase, timeout=60)).json()["rows"] == 11
    assert await asyncio.to_thread(found, metering, since_ms) == [], "what was removed on purpose is not missed"


def rows(metering: MeteringProcess) -> int:
    """Rows of the ledger."""
    return int(metering.get("/v1/reconcile")["sequence"])


def test_the_command_ends_with_1_on_a_difference(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    """`roundhouse usage reconcile`: a table and exit code 1; `--json` prints what metering answered."""
    import pytest
    import typer

    from roundhouse.cli import usage_reconcile

    difference = {"kind": "no_row", "request_id": "r1", "tenant": "t1", "detail": "gone"}
    answer: dict[str, Any] = {"from": "a", "to": "b", "checked": {"requests": 2}, "differences": [difference]}

    class Api:
        def get(self, path: str, **parameters: str) -> dict[str, Any]:
            assert (path, parameters) == ("/metering/differences", {"from": "2026-11-01"})
            return answer

    monkeypatch.setattr(usage_reconcile, "open_api", lambda *_: Api())
    with pytest.raises(typer.Exit) as ended:
        usage_reconcile.reconcile(since="2026-11-01", until="", as_json=True)
    assert ended.value.exit_code == 1
    assert json.loads(capsys.readouterr().out) == answer
    answer["differences"] = []
    usage_reconcile.reconcile(since="2026-11-01", until="")
    assert "0 differences" in capsys.readouterr().err + capsys.readouterr().out
