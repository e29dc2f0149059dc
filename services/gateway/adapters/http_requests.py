"""What routes need of a request: its body within a limit, a caller who may run models, its deadline."""

from starlette.requests import ClientDisconnect, Request

from roundhouse.clock import Clock
from roundhouse.errors import Forbidden, InvalidInput
from services.gateway.adapters.http_errors import BodyTooLarge
from services.gateway.domain.outcomes import ClientLeft
from services.gateway.operations.resolve_model import RequestContext
from services.gateway.ports import Caller

INFERENCE_SCOPE = "inference"
DEADLINE_HEADER = "x-request-deadline-ms"
FALLBACK_HEADER = "x-roundhouse-fallback"
DEADLINE_MS_MAX = 3_600_000  # a guess: an hour is the longest anyone should hold a slot
DIGITS_MAX = 18  # of a number in a header or a query: below 64 bits, and no work to read


class RequestReader:
    """Reads requests. `body_bytes_max` bounds memory, `deadline_ms` is the default time a request may take in all."""

    def __init__(self, clock: Clock, *, body_bytes_max: int, deadline_ms: int) -> None:
        self._clock = clock
        self._body_bytes_max = body_bytes_max
        self._deadline_ms = deadline_ms

    async def body(self, request: Request) -> bytes:
        """The whole body. Raises BodyTooLarge, as soon as it is known, and ClientLeft."""
        return await body_within(request, self._body_bytes_max)

    def inference_caller(self, request: Request) -> Caller:
        """The authenticated caller. Raises Forbidden for a key that may not run models."""
        caller: Caller = request.scope["state"]["caller"]
        return allowed_to_infer(caller)

    def context(self, request: Request) -> RequestContext:
        """Who asks, under which id, until when. Raises Forbidden, InvalidInput."""
        caller = self.inference_caller(request)
        fallback = _fallback_of(request.headers.get(FALLBACK_HEADER))
        return RequestContext(request.scope["state"]["request_id"], caller, self.deadline_unix_ms(request), fallback)

    def deadline_unix_ms(self, request: Request) -> int:
        """When the request must have ended. Raises InvalidInput for a header that is no positive number."""
        return self._clock.now_ms() + deadline_ms_of(request.headers.get(DEADLINE_HEADER), self._deadline_ms)


async def body_within(request: Request, bytes_max: int) -> bytes:
    """The whole body. Raises BodyTooLarge, as soon as it is known, and ClientLeft."""
    announced = request.headers.get("content-length", "0")
    if not announced.isdecimal() or int(announced) > bytes_max:
        raise _too_large(bytes_max)
    pieces: list[bytes] = []
    size = 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > bytes_max:
                raise _too_large(bytes_max)
            pieces.append(piece)
    except ClientDisconnect as error:
        raise ClientLeft from error
    return b"".join(pieces)


def _too_large(bytes_max: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body may have at most {bytes_max} bytes.", code="body_too_large")


def _fallback_of(text: str | None) -> bool | None:
    """Whether a smaller model may answer; None = the header is not there. Raises InvalidInput."""
    if text is None:
        return None
    if text not in ("allow", "never"):
        raise InvalidInput(f"'{FALLBACK_HEADER}' must be 'allow' or 'never'.", param=FALLBACK_HEADER)
    return text == "allow"


def deadline_ms_of(text: str | None, default: int) -> int:
    """Milliseconds from a deadline header, or the default. Raises InvalidInput."""
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX and 0 < int(text) <= DEADLINE_MS_MAX):
        raise InvalidInput(f"'{DEADLINE_HEADER}' must be 1 to {DEADLINE_MS_MAX}.", param=DEADLINE_HEADER)
    return int(text)


def allowed_to_infer(caller: Caller) -> Caller:
    """The caller, if its key may run models; raises Forbidden."""
    if INFERENCE_SCOPE not in caller.scopes:
        raise Forbidden("This key may not run models.")
    return caller
