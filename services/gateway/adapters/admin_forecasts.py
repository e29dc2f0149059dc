"""Why a model is, or is not, warm: asked of the scheduler over the bus, shown as JSON to operators."""

from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from roundhouse import subjects
from roundhouse.errors import NotFound, Unavailable
from roundhouse.event_bus import EventBus
from roundhouse.wire.v1 import residency_pb2

TIMEOUT_MS = 2_000


class BusForecasts:
    """Asks whichever scheduler replica answers."""

    def __init__(self, bus: EventBus) -> None:
        self._bus = bus

    async def of(self, model: str) -> dict[str, Any]:
        """The forecast with its reasons; field names are those of `ForecastReply`.

        Raises NotFound (the scheduler's catalogue has no such model), Unavailable (no scheduler answers)."""
        request = residency_pb2.ForecastRequest(model=model)
        answer = await self._bus.request(subjects.FORECAST, request.SerializeToString(), timeout_ms=TIMEOUT_MS)
        try:
            reply = residency_pb2.ForecastReply.FromString(answer)
        except DecodeError as error:
            raise Unavailable("the scheduler's answer cannot be read") from error
        if not reply.known:
            raise NotFound(f"no model {model!r}")
        found = MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        del found["known"]
        return {name: int(value) if name in _INTEGERS else value for name, value in found.items()}


_INTEGERS = frozenset({"arrivals", "idle_ms", "next_ms_p10", "next_ms_p50", "next_ms_p90"})
"""64-bit fields, which protobuf's JSON makes strings."""
