"""The part of metering's HTTP API that is about money: prices, periods, statements.

Internal, like the usage API: the gateway's admin API stands before it. Every write is idempotent.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from roundhouse.clock import Clock
from roundhouse.errors import InvalidInput, NotFound
from services.metering.adapters.exports import FORMATS
from services.metering.adapters.price_bodies import PricesBody, rule_json, rules_of
from services.metering.adapters.signing import signature_holds
from services.metering.adapters.statement_formats import period_json, statement_csv, statement_json, statement_text
from services.metering.domain.periods import parse_instant, parse_month
from services.metering.domain.rating import money_text
from services.metering.domain.statements import ClosedPeriod, differences
from services.metering.domain.usage import TIME_MS_END
from services.metering.money_ports import (
    Accounts,
    Entries,
    Forgetting,
    PriceStore,
    Pricing,
    RatingPage,
    Rerating,
    StreamErasure,
)
from services.metering.operations.applying import apply_prices
from services.metering.operations.exporting import period_entries
from services.metering.operations.forgetting import erase_tenant
from services.metering.operations.rerating import RerateReport, rerate_period
from services.metering.ports import Ledger

BODY_BYTES_MAX: Final = 8 * 1024 * 1024  # ten thousand prices are about 2 MB
Body = TypeVar("Body")


class RerateBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/prices/rerate."""

    from_: str = msgspec.field(name="from", default="")
    to: str = ""
    dry_run: bool = False


class RepublishBody(msgspec.Struct, forbid_unknown_fields=True):
    """POST /v1/billing/republish."""

    from_sequence: int


@dataclass(frozen=True, slots=True)
class MoneyServices:
    """What this part of the API works with."""

    accounts: Accounts
    prices: PriceStore
    pricing: Pricing
    rerating: Rerating
    entries: Entries
    forgetting: Forgetting
    streams: StreamErasure
    ledger: Ledger
    clock: Clock


def accounts_router(services: MoneyServices) -> APIRouter:
    """The routes."""
    router = APIRouter()
    api = _AccountsApi(services)
    for method, path, handler in (
        ("GET", "/v1/prices", api.list_prices),
        ("POST", "/v1/prices", api.apply_prices),
        ("POST", "/v1/prices/rerate", api.rerate),
        ("GET", "/v1/periods", api.list_periods),
        ("GET", "/v1/periods/{month}", api.show_period),
        ("POST", "/v1/periods/{month}/close", api.close_period),
        ("GET", "/v1/periods/{month}/verify", api.verify_period),
        ("GET", "/v1/periods/{month}/tenants", api.list_tenants),
        ("GET", "/v1/statements/{month}", api.statement),
        ("GET", "/v1/export/{month}", api.export),
        ("POST", "/v1/billing/republish", api.republish),
        ("POST", "/v1/tenants/{tenant}/erase", api.erase),
    ):
        _add(router, method, path, handler)
    return router


def _add(router: APIRouter, method: str, path: str, handler: Callable[[Request], Awaitable[Response]]) -> None:
    router.add_api_route(path, handler, methods=[method], summary=(handler.__doc__ or "").strip())


class _AccountsApi:
    def __init__(self, services: MoneyServices) -> None:
        self._services = services

    async def list_prices(self, request: Request) -> Response:
        """Every version of every price"""
        return JSONResponse({"prices": [rule_json(rule) for rule in await self._services.prices.rules()]})

    async def apply_prices(self, request: Request) -> Response:
        """Add new versions of prices"""
        body = await read_body(request, PricesBody)
        added = await apply_prices(
            self._services.prices, rules_of(body.prices), self._services.clock, dry_run=body.dry_run
        )
        return JSONResponse({"added": [rule_json(rule) for rule in added], "dry_run": body.dry_run})

    async def rerate(self, request: Request) -> Response:
        """Rate recorded usage again, by corrections"""
        body = await read_body(request, RerateBody)
        page = RatingPage(_instant(body.from_, "from", 0), _instant(body.to, "to", TIME_MS_END), dry_run=body.dry_run)
        report = await rerate_period(self._services.rerating, self._services.pricing, self._services.clock, page)
        return JSONResponse(_report_json(report) | {"dry_run": body.dry_run})

    async def list_periods(self, request: Request) -> Response:
        """Closed periods"""
        return JSONResponse({"periods": [period_json(closed) for closed in await self._services.accounts.closed()]})

    async def show_period(self, request: Request) -> Response:
        """One closed period, with its signature"""
        return JSONResponse(period_json(await self._closed(request)))

    async def close_period(self, request: Request) -> Response:
        """Close a period and sign its totals"""
        closed = await self._services.accounts.close(month_of(request), now_ms=self._services.clock.now_ms())
        return JSONResponse(period_json(closed))

    async def verify_period(self, request: Request) -> Response:
        """Whether a closed period is what was signed, and the ledger still says so"""
        closed = await self._closed(request)
        found = differences(closed, await self._services.accounts.sums(closed.period_ms))
        holds = signature_holds(closed.document, closed.signature, closed.public_key)
        answer = {"signature_holds": holds, "ledger_agrees": not found, "differences": found}
        return JSONResponse(period_json(closed) | answer)

    async def list_tenants(self, request: Request) -> Response:
        """For whom anything is booked in a period"""
        return JSONResponse({"tenants": list(await self._services.accounts.tenants(month_of(request)))})

    async def statement(self, request: Request) -> Response:
        """What is booked for a tenant in a period"""
        tenant = request.query_params.get("tenant", "")
        if not tenant:
            raise InvalidInput("a statement is of one tenant", param="tenant")
        statement = await self._services.accounts.statement(tenant, month_of(request))
        match request.query_params.get("format", "json"):
            case "json":
                return JSONResponse(statement_json(statement))
            case "text":
                return PlainTextResponse(statement_text(statement))
            case "csv":
                return PlainTextResponse(statement_csv(statement), media_type="text/csv")
        raise InvalidInput("format must be json, text or csv", param="format")

    async def export(self, request: Request) -> Response:
        """Every entry of a period, as CSV, Parquet or CloudEvents (jsonl)"""
        month_ms, kind = month_of(request), request.query_params.get("format", "csv")
        if kind not in FORMATS:
            raise InvalidInput("format must be csv, jsonl or parquet", param="format")
        write, media_type = FORMATS[kind]
        pages = period_entries(self._services.entries, month_ms, request.query_params.get("tenant") or None)
        name = f"usage-{request.path_params['month']}.{kind}"
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return StreamingResponse(write(pages, month_ms), media_type=media_type, headers=headers)

    async def republish(self, request: Request) -> Response:
        """Publish the billing stream again, from a sequence on"""
        body = await read_body(request, RepublishBody)
        if body.from_sequence < 1:
            raise InvalidInput("sequences begin at 1", param="from_sequence")
        rows = await self._services.ledger.publish_again(after=body.from_sequence - 1)
        return JSONResponse({"from_sequence": body.from_sequence, "rows": rows})

    async def erase(self, request: Request) -> Response:
        """Make a tenant anonymous, for ever; sums stay"""
        services = self._services
        erased = await erase_tenant(
            services.forgetting, services.streams, services.clock, request.path_params["tenant"]
        )
        return JSONResponse({"pseudonym": erased.pseudonym, "rows": erased.rows})

    async def _closed(self, request: Request) -> ClosedPeriod:
        period_ms = month_of(request)
        for closed in await self._services.accounts.closed():
            if closed.period_ms == period_ms:
                return closed
        raise NotFound(f"{request.path_params['month']} is not closed yet: close it first", code="period_not_closed")


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The body, checked. Raises InvalidInput."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > BODY_BYTES_MAX:
            raise InvalidInput(f"the body is longer than {BODY_BYTES_MAX} bytes")
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"the body is not what this takes: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput("the body is not JSON") from error


def month_of(request: Request) -> int:
    """The month in the path. Raises InvalidInput."""
    month = parse_month(request.path_params["month"])
    if month is None:
        raise InvalidInput("a period is a month such as 2026-11", param="month")
    return month


def _instant(text: str, name: str, default: int) -> int:
    found = parse_instant(text) if text else default
    if found is None:
        raise InvalidInput(f"{name} must be a date, an RFC 3339 time with an offset, or Unix milliseconds", param=name)
    return found


def _report_json(report: RerateReport) -> dict[str, Any]:
    return {
        "examined": report.examined,
        "corrected": report.corrected,
        "difference": {
            currency or "unpriced": money_text(amount) for currency, amount in sorted(report.difference.items())
        },
        "moves": [{"from": old, "to": new, "rows": count} for (old, new), count in sorted(report.moves.items())],
    }
