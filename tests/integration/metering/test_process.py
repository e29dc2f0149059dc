"""A metering process on real NATS and Valkey: crashes, poison, restarts of the bus, and what it then says."""

import asyncio
import random
import signal
from collections import Counter
from decimal import Decimal
from pathlib import Path
from shutil import rmtree

from nats.js.api import ConsumerConfig, DeliverPolicy

from roundhouse import subjects
from roundhouse.catalogue.store import CatalogueStore
from roundhouse.environment import kill_tests_wanted
from roundhouse.errors import Unavailable
from roundhouse.event_bus import NatsBus, connect_bus
from roundhouse.redis_edge import open_redis
from roundhouse.wire.v1 import usage_pb2
from services.metering.adapters.usage_wire import encode_event
from tests import infra
from tests.builders.usage import abandoned, priced_catalogue, usage_facts
from tests.integration.metering.conftest import MeteringProcess, emit, wait_for

KILLS = 5 if kill_tests_wanted() == "all" else 3
EVENTS = 100 * KILLS


def attempts(metering: MeteringProcess) -> int:
    """Attempts in the ledger."""
    totals = metering.get("/v1/reconcile")["totals"]
    return int(totals[0]["attempts"]) if totals else 0


def wait_for_attempts(metering: MeteringProcess, wanted: int) -> None:
    """Within the 15 s of case B38."""
    wait_for(lambda: attempts(metering) == wanted, within_s=15, what=f"{wanted} attempts")


def published(metering: MeteringProcess) -> bool:
    """Whether the billing stream has every row."""
    found = metering.get("/v1/reconcile")
    return bool(found["sequence"] == found["published_sequence"])


async def billing_records(bus: NatsBus) -> list[usage_pb2.RatedRecord]:
    """Every record of the billing stream, in its order."""
    config = ConsumerConfig(deliver_policy=DeliverPolicy.ALL)
    subscription = await bus.jetstream.subscribe(
        subjects.BILLING_SUBJECTS, stream=subjects.BILLING_STREAM, ordered_consumer=True, config=config
    )
    expected = (await bus.jetstream.stream_info(subjects.BILLING_STREAM)).state.messages
    records = [usage_pb2.RatedRecord.FromString((await subscription.next_msg(5)).data) for _ in range(expected)]
    await subscription.unsubscribe()
    return records


async def test_kills_at_random_points_lose_and_double_nothing(metering: MeteringProcess, bus: NatsBus) -> None:
    """kill -9 in each hundred events: each counts once (invariant 14); billing has every sequence, in order."""
    chance = random.Random(7)
    events = [usage_facts(f"r{n}", tenant_id=f"t{n % 7}") for n in range(EVENTS)]
    for start in range(0, EVENTS, 100):
        metering.start()
        await asyncio.to_thread(wait_for, metering.ready, within_s=60, what="ready")
        sending = asyncio.create_task(emit(bus, *events[start : start + 100]))
        await asyncio.sleep(chance.uniform(0, 0.12))  # the point of the crash: sending takes about this long
        metering.end(signal.SIGKILL)
        await sending
    metering.start()
    await asyncio.to_thread(wait_for, metering.ready, within_s=60, what="ready")
    await asyncio.to_thread(wait_for, lambda: attempts(metering) == EVENTS, within_s=40, what="all events counted")
    await asyncio.to_thread(wait_for, lambda: published(metering), within_s=20, what="all rows published")
    totals = metering.get("/v1/reconcile")["totals"][0]
    assert (totals["requests"], totals["output_tokens"]) == (EVENTS, EVENTS * 200)
    assert Decimal(totals["amount"]) == EVENTS * Decimal("0.00492")
    sequences = [record.sequence for record in await billing_records(bus)]
    first_seen = list(dict.fromkeys(sequences))
    assert first_seen == list(range(1, EVENTS + 1))


async def test_poison_is_put_aside_and_the_rest_flows(metering: MeteringProcess, bus: NatsBus) -> None:
    """Case B36 and poison: no event, a foreign subject, a changed repeat are put aside; good events count once."""
    metering.start()
    subject = subjects.usage("t1")
    await bus.publish_durable(subject, b"\xff\xff\xff", message_id="poison")
    foreign = usage_facts("r9", tenant_id="t2")
    await emit(bus, usage_facts("evt"), usage_facts("evt", tenant_id="t2"))
    await emit(bus, usage_facts("evt"), message_id="repeat")
    await emit(bus, usage_facts("evt", output_tokens=999), message_id="changed")
    await bus.publish_durable(subject, encode_event(foreign).SerializeToString(), message_id="foreign")
    await emit(bus, abandoned("gone"), usage_facts("gone"), usage_facts("last"))
    await asyncio.to_thread(wait_for, metering.ready, within_s=60, what="ready")
    await asyncio.to_thread(wait_for, lambda: attempts(metering) == 4, within_s=15, what="four attempts")
    await asyncio.to_thread(wait_for, lambda: published(metering), within_s=10, what="all rows published")
    found = metering.get("/v1/reconcile")
    assert (found["quarantined"], found["corrections"], found["sequence"]) == (3, 1, 5)
    results = Counter(
        {
            line.split('result="')[1].split('"')[0]: round(float(line.split()[-1]))
            for line in metering.metrics().splitlines()
            if line.startswith("roundhouse_metering_events_total")
        }
    )
    assert results == {"recorded": 4, "duplicate": 1, "superseded": 1, "quarantined": 3}
    records = await billing_records(bus)
    corrections = [record.event.data.corrects_id for record in records if record.event.data.corrects_id]
    assert corrections == ["gone/1"]
    assert metering.end(signal.SIGTERM) == 0


async def test_a_bus_that_restarts_or_comes_back_empty_is_followed(
    nats_server: infra.FaultyServer, redis_url: str, tmp_path: Path
) -> None:
    """Case B38: kill -9 of NATS, back on the same and then on an empty directory; the same process meters on."""
    assert isinstance(nats_server, infra.ProgramServer)
    await put_catalogue(redis_url)
    metering = MeteringProcess(nats_server.url, redis_url, tmp_path)
    metering.start()
    try:
        await asyncio.to_thread(wait_for, metering.ready, within_s=60, what="ready")
        for turn, empty in enumerate((False, True), start=1):
            nats_server.kill()
            await asyncio.to_thread(wait_for, lambda: not metering.ready(), within_s=30, what="not ready")
            if empty:
                rmtree(nats_server.data)
            await asyncio.to_thread(nats_server.restart)
            await asyncio.to_thread(wait_for, metering.ready, within_s=60, what="ready again")
            bus = await connect_bus(nats_server.url, name="test")
            await emit(bus, *(usage_facts(f"turn{turn}-{n}") for n in range(10)))
            await asyncio.to_thread(wait_for_attempts, metering, turn * 10)
            info = await bus.jetstream.consumer_info(subjects.USAGE_STREAM, "metering")
            assert (info.num_pending, info.num_ack_pending) == (0, 0)
            await asyncio.to_thread(wait_for, lambda: published(metering), within_s=10, what="all rows published")
            await bus.close()
    finally:
        metering.end(signal.SIGKILL)


async def test_events_wait_for_the_first_catalogue(nats_url: str, redis_url: str, tmp_path: Path) -> None:
    """Without any catalogue nothing is booked as free of charge; with one, the waiting events are rated."""
    metering = MeteringProcess(nats_url, redis_url, tmp_path)
    metering.start()
    try:
        bus = await connect_bus(nats_url, name="test")
        await emit(bus, usage_facts())
        await asyncio.to_thread(wait_for, lambda: "usage_not_recorded" in metering.log(), within_s=20, what="held")
        assert not metering.ready()
        await put_catalogue(redis_url)
        await asyncio.to_thread(wait_for, metering.ready, within_s=60, what="ready")
        await asyncio.to_thread(wait_for, lambda: attempts(metering) == 1, within_s=15, what="counted")
        assert metering.get("/v1/reconcile")["totals"][0]["amount"] == "0.00492"
        await bus.close()
    finally:
        metering.end(signal.SIGKILL)


async def put_catalogue(redis_url: str) -> None:
    """Store `priced_catalogue`."""
    redis = open_redis(redis_url)
    try:
        await CatalogueStore(redis).put(priced_catalogue(), expected_generation=0)
    except Unavailable as error:
        raise AssertionError("the test's Valkey is away") from error
    finally:
        await redis.aclose()
