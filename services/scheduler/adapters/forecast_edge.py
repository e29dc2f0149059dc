"""`rh.v1.scheduler.forecast`: operators ask one replica, and all know the same past."""

import structlog
from google.protobuf.message import DecodeError

from roundhouse import subjects
from roundhouse.event_bus import EventBus, Message, Subscription
from roundhouse.wire.v1 import residency_pb2
from services.scheduler.operations.explain_forecast import explain_forecast
from services.scheduler.operations.foresight import Foresight
from services.scheduler.ports import CatalogueSource

log = structlog.get_logger(__name__)


class ForecastEdge:
    """Answers over the bus."""

    def __init__(self, bus: EventBus, foresight: Foresight, catalogue: CatalogueSource) -> None:
        self._bus = bus
        self._foresight = foresight
        self._catalogue = catalogue

    async def subscribe(self) -> Subscription:
        """Begin to listen. Stop the subscription to drain."""
        return await self._bus.subscribe(subjects.FORECAST, self._on_request, group=subjects.SCHEDULER_GROUP)

    async def _on_request(self, message: Message) -> bytes | None:
        try:
            request = residency_pb2.ForecastRequest.FromString(message.data)
        except DecodeError:
            log.error("message_unreadable", subject=subjects.FORECAST)
            return None
        return explain_forecast(self._foresight, self._catalogue, request.model).SerializeToString()
