"""An answer that is run once for an `Idempotency-Key`: kept when it is complete, given again to whoever repeats it.

A request with a key runs to its end even if its client leaves, because the answer is for the client's next try; its
deadline still bounds it. Only complete answers are kept: a refusal, a failure or a passed deadline gives the key back.
The store must be there before anything runs, and if it is lost afterwards the client still gets its answer.
"""

import asyncio
import uuid
from contextlib import suppress

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roundhouse.clock import Clock
from roundhouse.errors import Conflict, DeadlinePassed, LimitExceeded, Unavailable
from roundhouse.vocabulary import TenantId
from services.gateway.adapters.client_connection import Sender, while_connected
from services.gateway.domain.idempotency import (
    ANSWER_BYTES_MAX,
    HEADER,
    RENEW_MS,
    Answer,
    Busy,
    Claimed,
    Differs,
    Full,
    Kept,
)
from services.gateway.domain.openai_chunks import DONE
from services.gateway.operations.answer_ports import AnswerStore
from services.gateway.operations.resolve_model import RequestContext
from services.gateway.operations.shielding import finished_anyway

log = structlog.get_logger(__name__)

ASK_AGAIN_MS_MIN, ASK_AGAIN_MS_MAX = 100, 1_000
FORWARD_S_MAX = 10.0  # a client that takes nothing for so long gets nothing more; the run goes on
KEEP_TRIES = 3
_KEPT_HEADERS = frozenset({"content-type", "cache-control"})


class IdempotentAnswer:
    """ASGI answer that claims the key, then runs `answer`, or waits for who does, or repeats what was kept."""

    def __init__(
        self, answer: ASGIApp, store: AnswerStore, clock: Clock, context: RequestContext, key: str, fingerprint: str
    ) -> None:
        self._answer = answer
        self._store = store
        self._clock = clock
        self._context = context
        self._tenant: TenantId = context.caller.tenant_id
        self._key = key
        self._fingerprint = fingerprint
        self._owner = uuid.uuid4().hex
        self._kept: Answer | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises Conflict, LimitExceeded, DeadlinePassed and Unavailable before anything was run."""
        gone = True

        async def claimed() -> None:
            nonlocal gone
            try:
                self._kept = await self._wait_for_claim()
            except (asyncio.CancelledError, Unavailable):  # it may have been claimed, or be just now
                await finished_anyway(self._give_back())
                raise
            gone = False

        await while_connected(receive, claimed(), Sender(send), scope)
        if gone:
            return
        if self._kept is not None:
            await _repeat(self._kept, send)
        else:
            await self._run(scope, send)

    async def _give_back(self) -> None:
        with suppress(Unavailable):  # then it ends by itself
            await self._store.release(self._tenant, self._key, self._owner)

    async def _wait_for_claim(self) -> Answer | None:
        """None: the key is ours. Else the kept answer."""
        pause_ms = ASK_AGAIN_MS_MIN
        while True:
            outcome = await self._store.claim(self._tenant, self._key, self._fingerprint, self._owner)
            match outcome:
                case Claimed():
                    return None
                case Kept(answer):
                    if answer is None:
                        raise Conflict(
                            "This request was answered before, with more than is kept.",
                            code="idempotency_answer_not_kept",
                            param=HEADER,
                        )
                    return answer
                case Differs():
                    raise Conflict(
                        "This key was used with another request.", code="idempotency_key_reused", param=HEADER
                    )
                case Full(retry_after_ms):
                    raise LimitExceeded("Too many answers are kept for you.", retry_after_ms=retry_after_ms)
                case Busy():
                    left_ms = self._context.deadline_unix_ms - self._clock.now_ms()
                    if left_ms <= 0:
                        raise DeadlinePassed("The first request with this key has not ended yet.")
                    await self._clock.sleep_ms(min(pause_ms, left_ms))
                    pause_ms = min(2 * pause_ms, ASK_AGAIN_MS_MAX)

    async def _run(self, scope: Scope, send: Send) -> None:
        recorder = _Recorder(send)
        renewal = asyncio.create_task(self._renew_forever(), name="idempotency_claim")
        try:
            # Without what would tell of the client's departure: the run goes on for whoever comes again.
            await self._answer({**scope, "extensions": {}}, _never_leaves, recorder)
        finally:
            renewal.cancel()
            await finished_anyway(self._end(recorder))

    async def _end(self, recorder: "_Recorder") -> None:
        """Keep or release; bounded by the store's own time-outs. The client has its answer whatever happens here."""
        answer = recorder.complete(self._context.request_id)
        for _ in range(KEEP_TRIES):
            try:
                if answer is not None:
                    await self._store.keep(self._tenant, self._key, self._owner, answer)
                else:
                    await self._store.release(self._tenant, self._key, self._owner)
                return
            except Unavailable:
                await self._clock.sleep_ms(ASK_AGAIN_MS_MIN)
        log.warning("idempotent_answer_not_kept", tenant_id=self._tenant, request_id=self._context.request_id)

    async def _renew_forever(self) -> None:
        while True:
            await self._clock.sleep_ms(RENEW_MS)
            with suppress(Unavailable):  # the next turn may reach the store before the lease has ended
                await self._store.renew(self._tenant, self._key, self._owner)


class _Recorder:
    """`send` that keeps what was sent, and goes on when the client takes nothing any more."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._gone = False
        self._status = 0
        self._headers: list[tuple[str, str]] = []
        self._body = bytearray()
        self._ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = int(message["status"])
            named = ((name.decode().lower(), value.decode()) for name, value in message["headers"])
            self._headers = [(name, value) for name, value in named if name in _KEPT_HEADERS]
        else:
            if len(self._body) <= ANSWER_BYTES_MAX:  # one piece more than the bound says that it is too long
                self._body += message.get("body", b"")
            self._ended = not message.get("more_body", False)
        await self._forward(message)

    async def _forward(self, message: Message) -> None:
        if self._gone:
            return
        try:
            async with asyncio.timeout(FORWARD_S_MAX):
                await self._send(message)
        except (OSError, TimeoutError):
            self._gone = True

    def complete(self, request_id: str) -> Answer | None:
        """The whole answer, if there was one: a stream that ended in an error is none."""
        if self._status != 200 or not self._ended:
            return None
        body = bytes(self._body)
        is_stream = any(value.startswith("text/event-stream") for _, value in self._headers)
        too_long = len(body) > ANSWER_BYTES_MAX
        if is_stream and not too_long and not body.endswith(DONE):
            return None
        return Answer(self._status, tuple(self._headers), body, request_id)


async def _never_leaves() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets this event")


async def _repeat(answer: Answer, send: Send) -> None:
    headers = [(name.encode(), value.encode()) for name, value in answer.headers]
    headers += [
        (b"content-length", str(len(answer.body)).encode()),
        (b"idempotent-replayed", b"true"),
        (b"x-original-request-id", answer.request_id.encode()),
    ]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})
