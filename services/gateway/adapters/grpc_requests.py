"""What gRPC services need of a call: who asks, under which id, until when. The twin of `http_requests`.

The key is in the metadata, as over HTTP in the headers; the deadline is the earlier of gRPC's own and the one in
`x-request-deadline-ms`.
"""

from typing import Any

from starlette.datastructures import Headers

from roundhouse.clock import Clock
from services.gateway.adapters.http_edge import Identify, key_text
from services.gateway.adapters.http_requests import DEADLINE_HEADER, allowed_to_infer, deadline_ms_of
from services.gateway.adapters.request_ids import new_request_id
from services.gateway.operations.resolve_model import RequestContext
from services.gateway.ports import Caller


class GrpcCalls:
    """Reads calls. `deadline_ms` is the default time a call may take in all."""

    def __init__(self, identify: Identify, clock: Clock, deadline_ms: int) -> None:
        self._identify = identify
        self._clock = clock
        self._deadline_ms = deadline_ms

    async def identified(self, context: Any) -> Caller:
        """The authenticated caller, whatever its key is for. Raises Unauthenticated, Unavailable."""
        return await self._identify(key_text(metadata_of(context)))

    async def caller(self, context: Any) -> Caller:
        """The authenticated caller, who may run models. Raises Unauthenticated, Forbidden, Unavailable."""
        return allowed_to_infer(await self.identified(context))

    async def request(self, context: Any) -> RequestContext:
        """Who asks, under a fresh id, until when. Raises as `caller`, and InvalidInput."""
        caller = await self.caller(context)
        return RequestContext(new_request_id(), caller, self.deadline_unix_ms(context))

    def deadline_unix_ms(self, context: Any) -> int:
        """When the call must have ended. Raises InvalidInput for a header that is no positive number."""
        wanted = deadline_ms_of(metadata_of(context).get(DEADLINE_HEADER), self._deadline_ms)
        left_s = context.time_remaining()
        return self._clock.now_ms() + (wanted if left_s is None else min(wanted, int(left_s * 1000)))


def metadata_of(context: Any) -> Headers:
    """The call's text metadata, as headers."""
    pairs = [(str(key), value) for key, value in context.invocation_metadata() or () if isinstance(value, str)]
    return Headers(raw=[(key.lower().encode(), value.encode()) for key, value in pairs])
