"""What nodes cost, over HTTP. Every answer says that it is an allocation."""

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from roundhouse.clock import Clock
from roundhouse.errors import InvalidInput
from services.metering.domain.costs import CostReport
from services.metering.domain.periods import DAY_MS, instant_text, parse_instant
from services.metering.domain.rating import money_text
from services.metering.money_ports import NodeHours
from services.metering.operations.costing import costs_between

NOTE: Final = (
    "Allocated amounts are shares of the nodes' cost by weighted tokens, a rule and not a measurement;"
    " seconds and tokens are measured."
)


@dataclass(frozen=True, slots=True)
class CostServices:
    """What this part of the API works with. `rates` are a node-hour by pool."""

    hours: NodeHours
    rates: Mapping[str, Decimal]
    currency: str
    clock: Clock


def costs_router(services: CostServices) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.get("/v1/costs", summary="What nodes cost, shared out to models: an allocation")
    async def costs(request: Request) -> Response:
        now_ms = services.clock.now_ms()
        to_ms = _instant(request, "to", now_ms)
        from_ms = _instant(request, "from", to_ms - DAY_MS)
        if from_ms >= to_ms:
            raise InvalidInput("to must be later than from", param="to")
        report = await costs_between(services.hours, from_ms, to_ms, services.rates)
        answer = {"kind": "allocation", "note": NOTE, "from": instant_text(from_ms), "to": instant_text(to_ms)}
        return JSONResponse(answer | report_json(report, services.currency))

    return router


def report_json(report: CostReport, currency: str) -> dict[str, Any]:
    """Measured quantities and allocated amounts under names of their own."""
    return {
        "pools": [
            {
                "pool": pool.pool,
                "node_seconds": pool.node_ms // 1000,
                "device_seconds": pool.device_ms // 1000,
                "per_node_hour": money_text(pool.per_node_hour),
                "cost": money_text(pool.cost),
                "currency": currency,
            }
            for pool in report.pools
        ],
        "shares": [
            {
                "pool": share.pool,
                "share_of": share.share_of,
                "model": share.model,
                "tokens": share.tokens,
                "run_seconds": share.run_ms // 1000,
                "allocated": money_text(share.allocated),
                "currency": currency,
            }
            for share in report.shares
        ],
        "unplaced_tokens": report.unplaced_tokens,
    }


def _instant(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name) or ""
    found = parse_instant(text) if text else default
    if found is None:
        raise InvalidInput(f"{name} must be a date, an RFC 3339 time with an offset, or Unix milliseconds", param=name)
    return found
