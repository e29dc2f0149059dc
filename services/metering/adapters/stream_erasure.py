"""Removes a tenant's messages from the streams: its billing records, and its usage events that are in the ledger.

An event that is not recorded yet stays until it is: it is recorded under the pseudonym, and a bill is not lost.
"""

from typing import Final

from nats.errors import Error as NatsError
from nats.js.errors import Error as JetStreamError

from roundhouse import subjects
from roundhouse.errors import Unavailable
from roundhouse.event_bus import NatsBus
from services.metering.adapters.usage_stream import CONSUMER

_ERRORS: Final = (NatsError, JetStreamError, TimeoutError)


class JetStreamErasure:
    """See `money_ports.StreamErasure`."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus

    async def erase(self, tenant_id: str) -> None:
        """See `StreamErasure.erase`."""
        jetstream = self._bus.jetstream
        try:
            recorded = await jetstream.consumer_info(subjects.USAGE_STREAM, CONSUMER)
            floor = 0 if recorded.ack_floor is None else recorded.ack_floor.stream_seq
            await jetstream.purge_stream(subjects.USAGE_STREAM, seq=floor + 1, subject=subjects.usage(tenant_id))
            for subject in (subjects.billing(tenant_id), f"{subjects.billing(tenant_id)}.>"):
                await jetstream.purge_stream(subjects.BILLING_STREAM, subject=subject)
        except _ERRORS as error:
            raise Unavailable("the streams do not answer") from error
