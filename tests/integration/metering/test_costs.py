"""Nodes that say they are there, and what they cost over HTTP."""

from decimal import Decimal
from pathlib import Path

import httpx
import pytest

from roundhouse.event_bus import Message
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from services.metering.adapters.costs_api import CostServices, costs_router
from services.metering.adapters.sql_ledger import SqlLedger
from services.metering.adapters.sql_nodes import SqlNodeHours
from services.metering.adapters.usage_api import usage_api
from services.metering.domain.costs import SLOT_MS, SLOTS_AN_HOUR
from services.metering.domain.periods import HOUR_MS, hour_start_ms
from services.metering.operations.costing import NodeWatch
from services.metering.settings import MeteringSettings, rates_of
from tests.builders.ledgers import database_url
from tests.builders.usage import TIME_MS, candidate, usage_facts
from tests.fakes.clock import ManualClock

HOUR = hour_start_ms(TIME_MS)


def state(slot: int, *, loading: bool = False) -> Message:
    """Node n1 of pool gold, with two devices, in a slot of the hour."""
    instances = [loading_pb2.Instance(state=vocabulary_pb2.INSTANCE_STATE_LOADING)] if loading else []
    said = loading_pb2.NodeState(
        node_id="n1", pool="gold", device_count=2, sent_unix_ms=HOUR + slot * SLOT_MS + 1, instances=instances
    )
    return Message("rh.v1.node.n1.state", said.SerializeToString())


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
async def test_two_processes_see_a_node_and_it_costs_once(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """A whole hour at 3.6: 360 slots of 0.01; 36 loading (0.36); 14,400 ms running (0.0144); idle the rest (3.2256)."""
    ledger = await SqlLedger.open(database_url(kind, request, tmp_path))
    hours = SqlNodeHours(ledger.database)
    one, two = NodeWatch(hours), NodeWatch(hours)
    for slot in range(SLOTS_AN_HOUR):
        await one.on_state(state(slot, loading=slot < 36))
        if slot % 3:
            await two.on_state(state(slot))
    await one.turn()
    await two.turn()
    await two.turn()
    await ledger.append(
        [candidate(usage_facts("r1", run_ms=14_400)), candidate(usage_facts("r2", node_id="n9"))], now_ms=1
    )
    services = CostServices(hours, rates_of("gold=3.6,*=100"), "USD", ManualClock(HOUR + HOUR_MS))
    transport = httpx.ASGITransport(app=usage_api(ledger, costs_router(services)))
    async with httpx.AsyncClient(transport=transport, base_url="http://metering") as client:
        body = (await client.get(f"/v1/costs?from={HOUR}")).json()
        assert (await client.get("/v1/costs?from=soon")).status_code == 400
    assert body["kind"] == "allocation"
    assert body["pools"] == [
        {
            "pool": "gold",
            "node_seconds": 3600,
            "device_seconds": 7200,
            "per_node_hour": "3.6",
            "cost": "3.6",
            "currency": "USD",
        }
    ]
    shares = [(share["share_of"], share["model"], share["tokens"], share["allocated"]) for share in body["shares"]]
    assert shares == [("model", "m1", 600 + 2 * 200, "0.0144"), ("load", "", 0, "0.36"), ("idle", "", 0, "3.2256")]
    assert sum(Decimal(share["allocated"]) for share in body["shares"]) == Decimal("3.6")
    assert body["unplaced_tokens"] == 1_000
    await ledger.close()


@pytest.mark.parametrize("text", ["shared", "shared=", "=2", "shared=x", "shared=-1", "a=1,b=NaN"])
def test_wrong_costs_are_refused_at_the_start(text: str) -> None:
    """With the part that is wrong."""
    with pytest.raises(ValueError, match="is not POOL=AMOUNT"):
        MeteringSettings(node_hour_costs=text)
