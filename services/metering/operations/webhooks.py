"""Sends the billing records to webhook endpoints, from the ledger, each endpoint at its own pace.

What an endpoint has is its own sequence in the ledger, moved after the receiver took a record: killed at any point, it
goes on there and repeats at most what it had not noted. A lease lets one process send to an endpoint at a time.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Final

import msgspec
import structlog

from roundhouse.clock import Clock
from services.metering.domain.ledger import LedgerRow
from services.metering.domain.webhooks import Dead, Endpoint, Step, Taken, TryAgain, Unwanted, signature, step_after
from services.metering.money_ports import WebhookPoster, WebhookStore

log = structlog.get_logger(__name__)

TURN_MS: Final = 500
ROWS_A_TURN: Final = 200  # to one endpoint, before others and the note of how far it is get their turn
NOTE_EVERY: Final = 20  # records that may be repeated after a crash
LEASE_MS: Final = 120_000  # longer than a turn: ROWS_A_TURN answers of a slow receiver are cut off by it
ENDPOINTS_AT_ONCE: Final = 8

Encode = Callable[[LedgerRow], tuple[str, bytes]]
"""A record's id and body."""


class WebhookSender:
    """A turn for `Lifecycle.every`."""

    def __init__(
        self, store: WebhookStore, poster: WebhookPoster, encode: Encode, clock: Clock, chance: Random, *, holder: str
    ) -> None:
        self._store = store
        self._poster = poster
        self._encode = encode
        self._clock = clock
        self._chance = chance
        self._holder = holder

    async def turn(self) -> None:
        """Send to every endpoint that is due. Raises Unavailable. Cancelled: an attempt may be repeated."""
        due = await self._store.claim(self._holder, now_ms=self._clock.now_ms(), lease_ms=LEASE_MS)
        permits = asyncio.Semaphore(ENDPOINTS_AT_ONCE)

        async def one(endpoint: Endpoint) -> None:
            async with permits:
                await self._serve(endpoint)

        async with asyncio.TaskGroup() as tasks:
            for endpoint in due:
                tasks.create_task(one(endpoint))

    async def _serve(self, endpoint: Endpoint) -> None:
        until_ms = self._clock.monotonic_ms() + LEASE_MS // 2
        page = await self._store.rows_after(endpoint, limit=ROWS_A_TURN)
        unnoted = 0
        for row in page.rows:
            endpoint, step = await self._deliver(endpoint, row)
            if isinstance(step, TryAgain | Unwanted):
                await self._store.note(endpoint, self._holder)
                return
            unnoted += 1
            if unnoted >= NOTE_EVERY:
                await self._store.note(endpoint, self._holder)
                unnoted = 0
            if self._clock.monotonic_ms() >= until_ms:
                break
        else:
            endpoint = replace(endpoint, sequence=max(endpoint.sequence, page.upto))
        await self._store.note(endpoint, self._holder)

    async def _deliver(self, endpoint: Endpoint, row: LedgerRow) -> tuple[Endpoint, Step]:
        message_id, body = self._encode(row)
        timestamp_s = self._clock.now_ms() // 1000
        headers = {
            "content-type": "application/cloudevents+json",
            "webhook-id": message_id,
            "webhook-timestamp": str(timestamp_s),
            "webhook-signature": signature(endpoint.secret, message_id, timestamp_s, body),
        }
        answer = await self._poster.post(endpoint.url, headers, body)
        step = step_after(answer, endpoint.attempts, self._clock.now_ms(), self._chance.random())
        match step:
            case Taken():
                return replace(endpoint, sequence=row.sequence, attempts=0, next_ms=0, last_error=""), step
            case TryAgain(at_ms, reason):
                _log_failure(endpoint, row, reason, "retry")
                return replace(endpoint, attempts=endpoint.attempts + 1, next_ms=at_ms, last_error=reason), step
            case Dead(reason):
                _log_failure(endpoint, row, reason, "dead")
                await self._store.bury(endpoint, row.sequence, reason, now_ms=self._clock.now_ms())
                return replace(endpoint, sequence=row.sequence, attempts=0, next_ms=0, last_error=reason), step
            case Unwanted(reason):
                _log_failure(endpoint, row, reason, "disabled")
                return replace(endpoint, active=False, last_error=reason), step


def _log_failure(endpoint: Endpoint, row: LedgerRow, reason: str, action: str) -> None:
    log.warning(
        "webhook_not_taken",
        endpoint=endpoint.endpoint_id,
        sequence=row.sequence,
        attempts=endpoint.attempts + 1,
        reason=reason,
        action=action,
    )


def encode_with(to_json: Callable[[LedgerRow], dict[str, object]]) -> Encode:
    """Records as JSON events that carry their own id."""
    encoder = msgspec.json.Encoder()

    def encode(row: LedgerRow) -> tuple[str, bytes]:
        event = to_json(row)
        return str(event["id"]), encoder.encode(event)

    return encode
