"""The query API over gRPC answers what the HTTP API answers."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from roundhouse.grpc_edge import GrpcServer, open_channel
from roundhouse.wire.v1 import metering_pb2 as wire
from roundhouse.wire.v1 import metering_pb2_grpc
from services.metering.adapters import metering_grpc
from services.metering.adapters.signing import PeriodSigner, signature_holds
from services.metering.adapters.sql_accounts import SqlAccounts
from services.metering.adapters.sql_ledger import SqlLedger
from services.metering.domain.periods import DAY_MS, day_start_ms, month_start_ms, next_month_ms
from tests.builders.usage import TIME_MS, candidate, usage_facts


@pytest.fixture
async def stub(tmp_path: Path) -> AsyncIterator[Any]:
    """A client of a service over three events of January 2026, which is closed."""
    ledger = await SqlLedger.open(f"sqlite:///{tmp_path}/ledger.sqlite3")
    accounts = SqlAccounts(ledger.database, cluster="test", sign=PeriodSigner(tmp_path / "key.pem").sign)
    events = [usage_facts("r1"), usage_facts("r2", time_ms=TIME_MS + DAY_MS), usage_facts("r3", tenant_id="t2")]
    await ledger.append([candidate(event) for event in events], now_ms=TIME_MS)
    month_ms = month_start_ms(TIME_MS)
    await accounts.close(month_ms, now_ms=next_month_ms(month_ms))
    server = GrpcServer()
    name = metering_grpc.add_to_server(metering_grpc.MeteringService(ledger, accounts), server.server)
    port = await server.start("127.0.0.1", 0, [name])
    channel = open_channel(f"127.0.0.1:{port}")
    yield metering_pb2_grpc.MeteringStub(channel)
    await channel.close()
    await server.stop(0)
    await ledger.close()


async def test_usage_by_group_in_pages(stub: Any) -> None:
    """Pages of one over two tenants; only what is grouped by is set."""
    request = wire.QueryUsageRequest(group_by=[wire.DIMENSION_TENANT], page_size=1)
    first = await stub.QueryUsage(request)
    request.page_token = first.next_page_token
    second = await stub.QueryUsage(request)
    found = [
        (group.tenant, group.model, group.sums.requests, group.sums.amount) for group in (*first.groups, *second.groups)
    ]
    assert found == [("t1", "", 2, "0.00984"), ("t2", "", 1, "0.00492")]
    assert second.next_page_token == ""
    days = await stub.QueryUsage(
        wire.QueryUsageRequest(filter=wire.UsageFilter(tenant="t1"), group_by=[wire.DIMENSION_DAY])
    )
    assert [group.day_start_unix_ms for group in days.groups] == [day_start_ms(TIME_MS), day_start_ms(TIME_MS) + DAY_MS]


async def test_records_in_pages(stub: Any) -> None:
    """The records of one tenant in ledger order."""
    request = wire.ListRecordsRequest(filter=wire.UsageFilter(tenant="t1"), page_size=1)
    first = await stub.ListRecords(request)
    request.page_token = first.next_page_token
    second = await stub.ListRecords(request)
    records = [*first.records, *second.records]
    assert [(record.sequence, record.event.id, record.period) for record in records] == [
        (1, "r1/1", "2026-01"),
        (2, "r2/1", "2026-01"),
    ]


async def test_statements_and_closed_periods(stub: Any) -> None:
    """The statement of t1 is in the signed totals under its pseudonym; the signature holds over the document."""
    statement = await stub.GetStatement(wire.GetStatementRequest(tenant="t1", period="2026-01"))
    assert (statement.closed, statement.totals[0].amount, statement.lines[0].usage_month) == (
        True,
        "0.00984",
        "2026-01",
    )
    (closed,) = (await stub.ListPeriods(wire.ListPeriodsRequest())).periods
    assert f'"{statement.signed_as}"' in closed.document
    texts = [base64.b64encode(raw).decode() for raw in (closed.signature, closed.public_key)]
    assert signature_holds(closed.document, *texts)


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("QueryUsage", wire.QueryUsageRequest(page_size=1001)),
        ("QueryUsage", wire.QueryUsageRequest(page_token="x")),
        ("QueryUsage", wire.QueryUsageRequest(group_by=[wire.DIMENSION_DAY, wire.DIMENSION_HOUR])),
        ("QueryUsage", wire.QueryUsageRequest(group_by=[wire.DIMENSION_UNSPECIFIED])),
        ("QueryUsage", wire.QueryUsageRequest(filter=wire.UsageFilter(from_unix_ms=2, to_unix_ms=1))),
        ("ListRecords", wire.ListRecordsRequest(page_token="x")),
        ("GetStatement", wire.GetStatementRequest(tenant="t1", period="January")),
        ("GetStatement", wire.GetStatementRequest(period="2026-01")),
    ],
)
async def test_a_bad_question_is_invalid(stub: Any, method: str, request_: Any) -> None:
    """INVALID_ARGUMENT, as 400 over HTTP."""
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await getattr(stub, method)(request_)
    assert told.value.code() == grpc.StatusCode.INVALID_ARGUMENT
