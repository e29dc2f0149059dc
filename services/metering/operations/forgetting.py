"""Makes a tenant anonymous on order, and removes single requests that are past their tenant's retention.

Both are idempotent: what was interrupted is done again. Totals, statements and signatures stay as they are.
"""

from typing import Final

import structlog

from roundhouse.clock import Clock
from services.metering.domain.periods import DAY_MS, day_start_ms
from services.metering.money_ports import Erased, Forgetting, StreamErasure
from services.metering.ports import PriceSource

log = structlog.get_logger(__name__)

RETENTION_EVERY_MS: Final = 3_600_000


async def erase_tenant(forgetting: Forgetting, streams: StreamErasure, clock: Clock, tenant_id: str) -> Erased:
    """First the ledger, then the streams. Raises Unavailable; then it is to be done again."""
    erased = await forgetting.erase(tenant_id, now_ms=clock.now_ms())
    await streams.erase(tenant_id)
    log.info("tenant_erased", rows=erased.rows, pseudonym=erased.pseudonym)  # its name is what must go
    return erased


class Retention:
    """A turn for `Lifecycle.every`: `usage_retention_days` of each tenant, as the catalogue says."""

    def __init__(self, forgetting: Forgetting, catalogue: PriceSource, clock: Clock) -> None:
        self._forgetting = forgetting
        self._catalogue = catalogue
        self._clock = clock

    async def turn(self) -> None:
        """Remove what is too old. Raises Unavailable."""
        today_ms = day_start_ms(self._clock.now_ms())
        for tenant in self._catalogue.current.tenants.values():
            if tenant.usage_retention_days is None:
                continue
            before_ms = today_ms - tenant.usage_retention_days * DAY_MS
            removed = await self._forgetting.remove(tenant.name, before_ms=before_ms)
            if removed:
                log.info("usage_rows_removed", tenant_id=tenant.name, rows=removed)
