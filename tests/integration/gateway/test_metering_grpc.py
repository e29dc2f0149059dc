"""Metering's gRPC API on the gateway's port: with a key, and only of the key's own tenant (invariant 16)."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from roundhouse.grpc_edge import GrpcServer
from roundhouse.wire.v1 import metering_pb2 as wire
from roundhouse.wire.v1 import metering_pb2_grpc
from tests.fakes.inference_node import FakeNode
from tests.integration.gateway.running_gateway import KEYS, running_gateway
from tests.unit.gateway.gateway_world import catalogue, llm_model

KEY = (("authorization", f"Bearer {KEYS['t1']}"),)
PERIOD = "2026-11"


class EchoingMetering(metering_pb2_grpc.MeteringServicer):
    """A metering that answers with whom it was asked about, and fails for one model."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def QueryUsage(self, request: wire.QueryUsageRequest, context: Any) -> wire.QueryUsageReply:
        """One group of the tenant in question."""
        self.asked.append(request.filter.tenant)
        if request.filter.model == "bad":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "page_token: it is of another question")
        groups = [wire.UsageGroup(tenant=request.filter.tenant, model=request.filter.model)]
        return wire.QueryUsageReply(groups=groups, next_page_token=request.page_token)

    async def ListRecords(self, request: wire.ListRecordsRequest, context: Any) -> wire.ListRecordsReply:
        """Nothing, for the tenant in question."""
        self.asked.append(request.filter.tenant)
        return wire.ListRecordsReply()

    async def GetStatement(self, request: wire.GetStatementRequest, context: Any) -> wire.Statement:
        """An empty statement of the tenant in question."""
        self.asked.append(request.tenant)
        return wire.Statement(tenant=request.tenant, period=request.period)

    async def ListPeriods(self, request: wire.ListPeriodsRequest, context: Any) -> wire.ListPeriodsReply:
        """It was asked about everybody."""
        self.asked.append("*")
        return wire.ListPeriodsReply()


@pytest.fixture
async def metering() -> AsyncIterator[tuple[EchoingMetering, str]]:
    """A metering on a real port."""
    server, service = GrpcServer(), EchoingMetering()
    metering_pb2_grpc.add_MeteringServicer_to_server(service, server.server)
    port = await server.start("127.0.0.1", 0, [])
    yield service, f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
async def stub(nats_url: str, redis_url: str, metering: tuple[EchoingMetering, str]) -> AsyncIterator[Any]:
    """Metering as a tenant's program sees it, through a gateway."""
    async with (
        running_gateway(
            nats_url, redis_url, catalogue(llm_model()), node=FakeNode(), metering_grpc=metering[1]
        ) as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.addresses.grpc}") as channel,
    ):
        yield metering_pb2_grpc.MeteringStub(channel)


async def code_of(call: Any) -> grpc.StatusCode:
    """The status that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code()


async def test_a_key_asks_for_its_own_tenant_whatever_it_says(stub: Any, metering: tuple[EchoingMetering, str]) -> None:
    """Without a tenant and with its own name, metering is asked about t1; the rest of the question is passed on."""
    for tenant in ("", "t1"):
        usage_filter = wire.UsageFilter(tenant=tenant, model="m")
        reply = await stub.QueryUsage(
            wire.QueryUsageRequest(filter=usage_filter, page_token="p2"), metadata=KEY, timeout=20
        )
        assert (reply.groups[0].tenant, reply.groups[0].model, reply.next_page_token) == ("t1", "m", "p2")
        await stub.ListRecords(wire.ListRecordsRequest(filter=usage_filter), metadata=KEY, timeout=20)
        statement = await stub.GetStatement(
            wire.GetStatementRequest(tenant=tenant, period=PERIOD), metadata=KEY, timeout=20
        )
        assert (statement.tenant, statement.period) == ("t1", PERIOD)
    assert metering[0].asked == ["t1"] * 6


async def test_no_other_tenant_can_be_asked_for_and_nobody_without_a_key(
    stub: Any, metering: tuple[EchoingMetering, str]
) -> None:
    """Another tenant's name is PERMISSION_DENIED, no key UNAUTHENTICATED, and metering hears of neither."""
    other = wire.UsageFilter(tenant="t2")
    calls = {
        stub.QueryUsage: wire.QueryUsageRequest(filter=other),
        stub.ListRecords: wire.ListRecordsRequest(filter=other),
        stub.GetStatement: wire.GetStatementRequest(tenant="t2", period=PERIOD),
        stub.ListPeriods: wire.ListPeriodsRequest(),
    }
    for method, request in calls.items():
        assert await code_of(method(request, metadata=KEY, timeout=20)) is grpc.StatusCode.PERMISSION_DENIED
        assert await code_of(method(request, timeout=20)) is grpc.StatusCode.UNAUTHENTICATED
    assert metering[0].asked == []


async def test_what_metering_refuses_is_refused_and_what_is_away_is_unavailable(
    stub: Any, metering: tuple[EchoingMetering, str], nats_url: str, redis_url: str
) -> None:
    """A bad question keeps its status; a gateway without metering says so."""
    bad = wire.QueryUsageRequest(filter=wire.UsageFilter(model="bad"))
    assert await code_of(stub.QueryUsage(bad, metadata=KEY, timeout=20)) is grpc.StatusCode.INVALID_ARGUMENT
    async with (
        running_gateway(nats_url, redis_url, catalogue(llm_model()), node=FakeNode(), instance_id="g2") as running,
        grpc.aio.insecure_channel(f"127.0.0.1:{running.addresses.grpc}") as channel,
    ):
        alone = metering_pb2_grpc.MeteringStub(channel)
        call = alone.QueryUsage(wire.QueryUsageRequest(), metadata=KEY, timeout=20)
        assert await code_of(call) is grpc.StatusCode.UNAVAILABLE
