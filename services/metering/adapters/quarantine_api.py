"""The quarantine over HTTP: what could not be recorded, and another try at it. For operators; names no contents."""

from typing import Any, Final

from fastapi import APIRouter

from roundhouse.clock import Clock
from roundhouse.errors import InvalidInput
from services.metering.adapters.usage_wire import decode_event
from services.metering.domain.periods import instant_text
from services.metering.domain.queries import BadQuery, parse_limit
from services.metering.money_ports import Pricing
from services.metering.operations.replaying import replay_quarantine
from services.metering.ports import Ledger, Quarantined

FINGERPRINT_SHOWN: Final = 12  # hex digits: enough to tell the entries of one quarantine apart


def quarantine_router(ledger: Ledger, pricing: Pricing, clock: Clock) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/v1/quarantine", summary="Events that could not be recorded, oldest first")
    async def show(limit: str = "") -> dict[str, Any]:
        rows_max = parse_limit(limit)
        if isinstance(rows_max, BadQuery):
            raise InvalidInput(rows_max.message, param=rows_max.param)
        return {"events": [quarantined_json(entry) for entry in await ledger.quarantined(limit=rows_max)]}

    @router.post("/v1/quarantine/replay", summary="Record what can be recorded now")
    async def replay() -> dict[str, Any]:
        counts = await replay_quarantine(ledger, decode_event, await pricing.book(), clock)
        return {"results": {result.value: count for result, count in sorted(counts.items())}}

    return router


def quarantined_json(entry: Quarantined) -> dict[str, Any]:
    """What may be told of an event that nobody could read."""
    return {
        "first_seen": instant_text(entry.first_seen_ms),
        "fingerprint": entry.fingerprint[:FINGERPRINT_SHOWN],
        "subject": entry.raw.subject,
        "bytes": len(entry.raw.data),
        "reason": entry.reason,
    }
