"""The comparison of the books over HTTP: `GET /v1/differences`. For operators; the gateway's admin API sees to that."""

from collections.abc import Sequence
from typing import Any, Final

from fastapi import APIRouter, Query

from roundhouse.clock import Clock
from roundhouse.errors import InvalidInput
from services.metering.domain.engine_books import EngineLine
from services.metering.domain.periods import HOUR_MS, instant_text, parse_instant
from services.metering.domain.reconciling import Comparison
from services.metering.operations.engine_watch import EngineWatch
from services.metering.operations.reconciling import Reconciler

SETTLE_MS: Final = 5_000  # what ended just now may not be everywhere yet
WINDOW_MS_MAX: Final = 24 * HOUR_MS


def reconciling_router(reconciler: Reconciler, engines: EngineWatch, clock: Clock) -> APIRouter:
    """The route. The engines' counts are those since the last full hour of this process, whatever the window."""
    router = APIRouter()

    @router.get(
        "/v1/differences", summary="What admissions, settlements, events, ledger and billing stream disagree on"
    )
    async def differences(
        from_: str = Query("", alias="from", description="start of the window; default an hour before its end"),
        to: str = Query("", description="end of the window, not included; default 5 s ago"),
    ) -> dict[str, Any]:
        to_ms = _instant("to", to, clock.now_ms() - SETTLE_MS)
        from_ms = _instant("from", from_, to_ms - HOUR_MS)
        if not 0 < to_ms - from_ms <= WINDOW_MS_MAX:
            raise InvalidInput("the window must end after its start, and be of a day at most", param="from")
        return comparison_json(await reconciler.between(from_ms, to_ms), await engines.so_far())

    return router


def comparison_json(comparison: Comparison, engines: Sequence[EngineLine]) -> dict[str, Any]:
    """The answer. Its shape is a contract: docs/operators/metering.md."""
    differences = [*comparison.differences, *(line.difference() for line in engines if line.differs)]
    return {
        "from": instant_text(comparison.from_ms),
        "to": instant_text(comparison.to_ms),
        "checked": dict(comparison.checked),
        "differences": [
            {
                "kind": each.kind.value,
                "request_id": each.request_id,
                "tenant": each.tenant_id,
                "detail": each.detail,
            }
            for each in differences
        ],
        "engines": [
            {
                "model": line.model,
                "engine_tokens": [line.engine_input, line.engine_output],
                "ledger_tokens": [line.ledger_input, line.ledger_output],
                "whole": line.whole,
            }
            for line in engines
        ],
    }


def _instant(name: str, text: str, default_ms: int) -> int:
    if not text:
        return default_ms
    found = parse_instant(text)
    if found is None:
        raise InvalidInput(f"{name} is no date, RFC 3339 time with offset or Unix milliseconds", param=name)
    return found
