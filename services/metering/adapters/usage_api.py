"""The query API: usage by group or by request, and totals to reconcile with.

Internal: it knows no keys and trusts its network. The gateway's admin API stands before it and decides whose usage a
caller may see. Answers are JSON; money is a decimal string, times are UTC. Bad parameters are 400 and name themselves.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import JSONResponse

from roundhouse.errors import InvalidInput, RoundhouseError, error_shape
from services.metering.adapters.paging import group_cursor, read_group_cursor, read_row_cursor, row_cursor
from services.metering.adapters.usage_json import group_json, reconciliation_json, request_json
from services.metering.domain.queries import (
    BadQuery,
    Dimension,
    EachRequest,
    UsageFilter,
    parse_filter,
    parse_group_by,
    parse_limit,
)
from services.metering.ports import Ledger

Parsed = TypeVar("Parsed")

_FILTER: Final = frozenset({"tenant", "model", "key", "from", "to"})
_PAGED: Final = _FILTER | {"group_by", "limit", "cursor"}


def usage_api(ledger: Ledger, *parts: APIRouter) -> FastAPI:
    """The ASGI app: usage, and the other parts of the API that are given."""
    app = FastAPI(title="Roundhouse metering", version="1", docs_url=None, redoc_url=None)
    for part in parts:
        app.include_router(part)
    app.add_exception_handler(RoundhouseError, _answer_error)

    @app.get("/v1/usage", summary="Usage by group or by request")
    async def usage(
        request: Request,
        tenant: str = "",
        model: str = "",
        key: str = "",
        from_: str = Query("", alias="from", description="start of the period: date, RFC 3339 or Unix milliseconds"),
        to: str = Query("", description="end of the period, not included"),
        group_by: str = Query("", description="tenant, model, adapter, class, key, day, hour; or request alone"),
        limit: str = "",
        cursor: str = "",
    ) -> dict[str, Any]:
        where = _filter_of(request, _PAGED)
        rows_max = _good(parse_limit(limit))
        by = parse_group_by(group_by)
        if isinstance(by, EachRequest):
            return await _request_page(ledger, where, cursor, rows_max)
        return await _group_page(ledger, where, _good(by), cursor, rows_max)

    @app.get("/v1/reconcile", summary="Totals to compare with what was admitted, settled and published")
    async def reconcile(
        request: Request,
        tenant: str = "",
        model: str = "",
        key: str = "",
        from_: str = Query("", alias="from"),
        to: str = "",
    ) -> dict[str, Any]:
        return reconciliation_json(await ledger.reconcile(_filter_of(request, _FILTER)))

    return app


async def _group_page(
    ledger: Ledger, where: UsageFilter, by: tuple[Dimension, ...], cursor: str, limit: int
) -> dict[str, Any]:
    after = _good(read_group_cursor(cursor, by)) if cursor else None
    page = await ledger.groups(where, by, after=after, limit=limit)
    rows = [group_json(group, by) for group in page.groups]
    return {"rows": rows, "next_cursor": None if page.next_after is None else group_cursor(page.next_after)}


async def _request_page(ledger: Ledger, where: UsageFilter, cursor: str, limit: int) -> dict[str, Any]:
    after = _good(read_row_cursor(cursor)) if cursor else None
    page = await ledger.rows(where, after=after, limit=limit)
    rows = [request_json(row) for row in page.rows]
    return {"rows": rows, "next_cursor": None if page.next_after is None else row_cursor(page.next_after)}


def _filter_of(request: Request, known: frozenset[str]) -> UsageFilter:
    given: Mapping[str, str] = request.query_params
    for name in given:
        if name not in known:
            raise InvalidInput(f"there is no parameter {name!r}; known are {', '.join(sorted(known))}", param=name)
    return _good(parse_filter(given))


def _good(parsed: Parsed | BadQuery) -> Parsed:
    if isinstance(parsed, BadQuery):
        raise InvalidInput(parsed.message, param=parsed.param)
    return parsed


async def _answer_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RoundhouseError)
    shape = error_shape(error)
    body = {"message": error.message, "type": shape.openai_type, "param": error.param, "code": error.code}
    return JSONResponse({"error": body}, status_code=shape.http_status)
