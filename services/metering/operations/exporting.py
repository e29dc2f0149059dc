"""Reads a period's books to the end, as they stand when it begins: what is booked meanwhile is left out."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from services.metering.domain.ledger import Entry
from services.metering.money_ports import Entries, EntryQuery


async def period_entries(entries: Entries, period_ms: int, tenant_id: str | None) -> AsyncIterator[Sequence[Entry]]:
    """Pages in ledger order; at least one, perhaps empty. Raises Unavailable, also midway."""
    query = EntryQuery(period_ms, upto=await entries.head(), tenant_id=tenant_id)
    while True:
        page = await entries.page(query)
        yield page.entries
        if page.next_after is None:
            return
        query = replace(query, after=page.next_after)
