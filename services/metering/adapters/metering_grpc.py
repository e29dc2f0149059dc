"""`roundhouse.v1.Metering`: the query API over gRPC. The same questions as over HTTP, with the same answers.

Internal, like the HTTP API: it knows no keys. Contract: metering.proto.
"""

import base64
from typing import Any, Final, TypeVar

from roundhouse.errors import InvalidInput
from roundhouse.wire.v1 import metering_pb2 as wire
from roundhouse.wire.v1 import metering_pb2_grpc
from services.metering.adapters.paging import group_cursor, read_group_cursor, read_row_cursor, row_cursor
from services.metering.adapters.usage_wire import rated_record
from services.metering.domain.periods import month_text, parse_month
from services.metering.domain.queries import (
    DEFAULT_GROUP_BY,
    LIMIT_DEFAULT,
    LIMIT_MAX,
    BadQuery,
    Dimension,
    Totals,
    UsageFilter,
    UsageGroup,
)
from services.metering.domain.rating import money_text
from services.metering.domain.statements import ClosedPeriod, Line, Statement, Sums
from services.metering.money_ports import Accounts
from services.metering.ports import Ledger

SERVICE: Final = wire.DESCRIPTOR.services_by_name["Metering"]
Parsed = TypeVar("Parsed")

_DIMENSIONS: Final = {
    wire.DIMENSION_TENANT: Dimension.TENANT,
    wire.DIMENSION_MODEL: Dimension.MODEL,
    wire.DIMENSION_ADAPTER: Dimension.ADAPTER,
    wire.DIMENSION_CLASS: Dimension.CLASS,
    wire.DIMENSION_KEY: Dimension.KEY,
    wire.DIMENSION_DAY: Dimension.DAY,
    wire.DIMENSION_HOUR: Dimension.HOUR,
}
_FIELDS: Final = {
    Dimension.TENANT: "tenant",
    Dimension.MODEL: "model",
    Dimension.ADAPTER: "adapter",
    Dimension.CLASS: "priority_class",
    Dimension.KEY: "key_id",
    Dimension.DAY: "day_start_unix_ms",
    Dimension.HOUR: "hour_start_unix_ms",
}


class MeteringService(metering_pb2_grpc.MeteringServicer):
    """The service. Errors are those of the HTTP API, as statuses."""

    def __init__(self, ledger: Ledger, accounts: Accounts) -> None:
        self._ledger = ledger
        self._accounts = accounts

    async def QueryUsage(self, request: wire.QueryUsageRequest, context: Any) -> wire.QueryUsageReply:  # noqa: N802
        """Sums by group."""
        by = _dimensions(request)
        after = _good(read_group_cursor(request.page_token, by)) if request.page_token else None
        page = await self._ledger.groups(_filter(request.filter), by, after=after, limit=_limit(request.page_size))
        token = "" if page.next_after is None else group_cursor(page.next_after)
        return wire.QueryUsageReply(groups=[_group(group, by) for group in page.groups], next_page_token=token)

    async def ListRecords(self, request: wire.ListRecordsRequest, context: Any) -> wire.ListRecordsReply:  # noqa: N802
        """Single records."""
        after = _good(read_row_cursor(request.page_token)) if request.page_token else None
        page = await self._ledger.rows(_filter(request.filter), after=after, limit=_limit(request.page_size))
        token = "" if page.next_after is None else row_cursor(page.next_after)
        return wire.ListRecordsReply(records=[rated_record(row) for row in page.rows], next_page_token=token)

    async def GetStatement(self, request: wire.GetStatementRequest, context: Any) -> wire.Statement:  # noqa: N802
        """What is booked for a tenant in a period."""
        period_ms = parse_month(request.period)
        if period_ms is None:
            raise InvalidInput("a period is a month such as 2026-11", param="period")
        if not request.tenant:
            raise InvalidInput("a statement is of one tenant", param="tenant")
        return _statement(await self._accounts.statement(request.tenant, period_ms))

    async def ListPeriods(self, request: wire.ListPeriodsRequest, context: Any) -> wire.ListPeriodsReply:  # noqa: N802
        """Closed periods."""
        return wire.ListPeriodsReply(periods=[_period(closed) for closed in await self._accounts.closed()])


def add_to_server(service: MeteringService, server: Any) -> str:
    """Serve it; the service's full name."""
    metering_pb2_grpc.add_MeteringServicer_to_server(service, server)
    return str(SERVICE.full_name)


def _filter(given: wire.UsageFilter) -> UsageFilter:
    if given.to_unix_ms and given.from_unix_ms >= given.to_unix_ms:
        raise InvalidInput("to must be later than from", param="to_unix_ms")
    return UsageFilter(
        tenant_id=given.tenant or None,
        model=given.model or None,
        key_id=given.key_id or None,
        from_ms=given.from_unix_ms or None,
        to_ms=given.to_unix_ms or None,
    )


def _dimensions(request: wire.QueryUsageRequest) -> tuple[Dimension, ...]:
    try:
        by = tuple(_DIMENSIONS[value] for value in request.group_by)
    except KeyError as error:
        raise InvalidInput("group_by names an unknown dimension", param="group_by") from error
    if len(set(by)) < len(by) or {Dimension.DAY, Dimension.HOUR} <= set(by):
        raise InvalidInput("group_by names a dimension twice, or both day and hour", param="group_by")
    return by or DEFAULT_GROUP_BY


def _limit(size: int) -> int:
    if size > LIMIT_MAX:
        raise InvalidInput(f"page_size must be at most {LIMIT_MAX}", param="page_size")
    return size or LIMIT_DEFAULT


def _group(group: UsageGroup, by: tuple[Dimension, ...]) -> wire.UsageGroup:
    named: dict[str, Any] = {_FIELDS[name]: value for name, value in zip(by, group.key[:-1], strict=True)}
    return wire.UsageGroup(sums=_usage_sums(group.totals), **named)


def _usage_sums(totals: Totals) -> wire.UsageSums:
    return wire.UsageSums(
        requests=totals.requests,
        attempts=totals.attempts,
        input_tokens=totals.input_tokens,
        cached_tokens=totals.cached_tokens,
        output_tokens=totals.output_tokens,
        amount=money_text(totals.amount),
        currency=totals.currency,
    )


def _statement(statement: Statement) -> wire.Statement:
    return wire.Statement(
        tenant=statement.tenant_id,
        period=month_text(statement.period_ms),
        closed=statement.closed_ms is not None,
        closed_unix_ms=statement.closed_ms or 0,
        sequence=statement.sequence,
        signed_as=statement.pseudonym,
        lines=[_line(line) for line in statement.lines],
        totals=[_net(sums) for sums in statement.totals],
    )


def _line(line: Line) -> wire.StatementLine:
    return wire.StatementLine(
        usage_month=month_text(line.usage_month_ms),
        model=line.model,
        adapter=line.adapter,
        priority_class=line.priority_class,
        price_id=line.price_id,
        sums=_net(line.sums),
    )


def _net(sums: Sums) -> wire.NetSums:
    return wire.NetSums(
        requests=sums.requests,
        attempts=sums.attempts,
        input_tokens=sums.input_tokens,
        cached_tokens=sums.cached_tokens,
        output_tokens=sums.output_tokens,
        amount=money_text(sums.amount),
        currency=sums.currency,
    )


def _period(closed: ClosedPeriod) -> wire.ClosedPeriod:
    return wire.ClosedPeriod(
        period=month_text(closed.period_ms),
        closed_unix_ms=closed.closed_ms,
        sequence=closed.sequence,
        document=closed.document,
        signature=base64.b64decode(closed.signature),
        public_key=base64.b64decode(closed.public_key),
    )


def _good(parsed: Parsed | BadQuery) -> Parsed:
    if isinstance(parsed, BadQuery):
        raise InvalidInput(parsed.message, param=parsed.param)
    return parsed
