"""`BillingStream` on JetStream: many records in flight, still strictly in ledger order.

Each record but the first of a window says which message must be the last of the stream before it
(`Nats-Expected-Last-Msg-Id`). If one is lost, the server refuses all after it, so none overtakes; the window is sent
again from the first that is missing. The message id drops repeats within the stream's duplicate window; consumers drop
the rest by the idempotency key.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import structlog
from nats.errors import Error as NatsError
from nats.js.errors import Error as JetStreamError
from nats.js.errors import NotFoundError

from roundhouse import subjects
from roundhouse.errors import Unavailable
from roundhouse.event_bus import NatsBus
from roundhouse.wire.v1 import usage_pb2
from services.metering.adapters.usage_wire import rated_record
from services.metering.domain.ledger import LedgerRow

log = structlog.get_logger(__name__)

WINDOW_TIMEOUT_S: Final = 5.0  # for all acknowledgements of one call; a local server needs milliseconds
_ERRORS: Final = (NatsError, JetStreamError, TimeoutError)


class JetStreamBilling:
    """See `ports.BillingStream`."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus

    async def publish(self, rows: Sequence[LedgerRow], *, turn: int = 0) -> int:
        """See `BillingStream.publish`."""
        if not self._bus.connected:
            raise Unavailable("the bus is away")
        answers = await self._send(rows, turn)
        done = 0
        for row, answer in zip(rows, answers, strict=False):
            if isinstance(answer, BaseException):
                break
            done = row.sequence
        if not done:
            raise Unavailable("the billing stream takes no record now")
        return done

    async def last_sequence(self) -> int | None:
        """See `BillingStream.last_sequence`."""
        if not self._bus.connected:
            raise Unavailable("the bus is away")
        try:
            last = await self._bus.jetstream.get_last_msg(subjects.BILLING_STREAM, subjects.BILLING_RECORDS)
        except NotFoundError:
            return await self._never_had_any()
        except _ERRORS as error:
            raise Unavailable("the billing stream does not answer") from error
        return int(usage_pb2.RatedRecord.FromString(last.data or b"").sequence)

    async def _never_had_any(self) -> int | None:
        try:
            state = (await self._bus.jetstream.stream_info(subjects.BILLING_STREAM)).state
        except _ERRORS as error:
            raise Unavailable("the billing stream does not answer") from error
        return 0 if not state.last_seq else None

    async def _send(self, rows: Sequence[LedgerRow], turn: int) -> list[Any]:
        futures: list[asyncio.Future[Any]] = []
        previous = ""
        try:
            async with asyncio.timeout(WINDOW_TIMEOUT_S):
                for row in rows:
                    record = rated_record(row)
                    name = f"{record.idempotency_key}+{turn}" if turn else record.idempotency_key
                    headers = {"Nats-Msg-Id": name}
                    if previous:
                        headers["Nats-Expected-Last-Msg-Id"] = previous
                    previous = name
                    futures.append(
                        await self._bus.jetstream.publish_async(
                            subjects.billing(row.facts.tenant_id), record.SerializeToString(), headers=headers
                        )
                    )
                await asyncio.wait(futures)
        except _ERRORS:
            log.debug("billing_window_failed")  # what was acknowledged counts; the rest is seen as failed below
        finally:
            outcomes = [_outcome(future) for future in futures]
        return outcomes


def _outcome(future: "asyncio.Future[Any]") -> Any:
    if not future.done():
        future.cancel()
        return TimeoutError()
    return asyncio.CancelledError() if future.cancelled() else future.exception()
