"""Accept or refuse a request: at once, truly, and without spending anything on what can never run.

Refusals change no queue and cause no load or eviction (invariant 15, cases B13 and B22).
"""

from dataclasses import replace

from roundhouse.catalogue.records import Catalogue, Model, Tenant
from roundhouse.clock import Clock
from roundhouse.errors import Unavailable
from roundhouse.vocabulary import ModelName, PoolName, PriorityClass, TenantId
from roundhouse.wire.v1 import scheduling_pb2 as wire
from services.scheduler.domain.nodes import Residence
from services.scheduler.domain.plans import PoolView
from services.scheduler.domain.records import (
    Known,
    Queued,
    QueueEntry,
    QueueFull,
    QueueLimit,
    Room,
    Shed,
    Standing,
    TooLate,
    VersionKey,
    attempt_id,
)
from services.scheduler.domain.viability import BackingOff, NoNode, TooBig, Viable, viability
from services.scheduler.operations.dispatch import Dispatcher
from services.scheduler.operations.foresight import Foresight, expected_load_ms
from services.scheduler.operations.nodes import DAZED_MS
from services.scheduler.operations.outlook import Outlook, Outlooks
from services.scheduler.operations.pools import DEFAULT_POOL, Pools
from services.scheduler.ports import Instruments

PAUSE_MS = 50
_WHOSE = {"": "", "k:": " of this key", "m:": " for this model"}
RETURN_MS = 60_000  # a guess: a Triton that died is back with its models in less
RETRY_SOON_MS = 1_000  # a guess: catalogue and node states arrive within a second


class Submission:
    """Answers `work.submit`. Idempotent by attempt."""

    def __init__(
        self,
        pools: Pools,
        dispatcher: Dispatcher,
        clock: Clock,
        instruments: Instruments,
        foresight: Foresight,
        outlooks: Outlooks,
    ) -> None:
        self._pools = pools
        self._dispatcher = dispatcher
        self._clock = clock
        self._instruments = instruments
        self._foresight = foresight
        self._outlooks = outlooks

    async def submit(self, request: wire.SubmitRequest) -> wire.SubmitReply:
        """Queue a request or say why not. Never raises for a store that is away: that is a refusal too."""
        for _ in range(DAZED_MS // PAUSE_MS):
            if not self._pools.nodes.dazed:
                break
            await self._clock.sleep_ms(PAUSE_MS)  # what it knew before it slept is no ground for a refusal
        reply = await self._decide(request)
        if reply.WhichOneof("result") == "refused":
            self._instruments.refused(_pool(request), wire.Refused.Reason.Name(reply.refused.reason))
        return reply

    async def _decide(self, request: wire.SubmitRequest) -> wire.SubmitReply:
        catalogue, pool = self._pools.catalogue.current, _pool(request)
        version = self._pools.queued_as(TenantId(request.tenant_id), request.model, request.model_digest)
        view, model = self._pools.view(pool), catalogue.models.get(ModelName(request.model))
        if model is None or not _is_served(model, request, view, version):
            return _refused(wire.Refused.REASON_MODEL_UNKNOWN, "this version of the model is not known", RETRY_SOON_MS)
        impossible = _never_fits(model, request)
        if impossible:
            return _refused(wire.Refused.REASON_NEVER_FITS, impossible)
        outlook = self._outlooks.of(pool, version, model, request)
        match viability(view, outlook.spec, self._clock.now_ms()):
            case TooBig(reason):
                return _refused(wire.Refused.REASON_NEVER_FITS, f"the model can never be loaded: {reason}")
            case NoNode() if request.attempt > 1:
                # It was accepted before and may be a stream in the middle: its node, or another, may be back in time.
                patient = wire.SubmitRequest()
                patient.CopyFrom(request)
                patient.deadline_unix_ms = min(request.deadline_unix_ms, self._clock.now_ms() + RETURN_MS)
                return await self._queue(patient, model, outlook, 0)
            case NoNode():
                message = "no healthy node serves the model"
                refused = _refused(wire.Refused.REASON_UNAVAILABLE, message, RETRY_SOON_MS)
                return self._instead(request, model, refused)
            case BackingOff(retry_at_ms, _, cause):
                wait_ms = max(1, retry_at_ms - self._clock.now_ms())
                refused = _refused(wire.Refused.REASON_UNAVAILABLE, f"the model failed to load: {cause}", wait_ms)
                return self._instead(request, model, refused)
            case Viable(slots):
                return await self._queue(request, model, outlook, slots)

    async def _queue(self, request: wire.SubmitRequest, model: Model, outlook: Outlook, slots: int) -> wire.SubmitReply:
        """Queue it, unless its fallback is expected to keep a promise that this model would break."""
        catalogue = self._pools.catalogue.current
        promise_ms = outlook.promise_ms(model, is_ready=slots > 0)
        other = self._outlooks.fallback(catalogue, model, request)
        if other is not None and other[1].total_ms < outlook.total_ms > promise_ms:
            return _redirected(other[0], outlook.total_ms, outlook.expected.reason)
        cold_ms = 0 if slots else min(outlook.expected.start_ms, expected_load_ms(outlook.view, outlook.spec))
        entry, room = _entry(request, catalogue, outlook), _room(catalogue, request, slots, cold_ms)
        if other is not None:
            patient = replace(room, wait_most_ms=max(1, promise_ms - outlook.first_token_ms))
            reply = await self._enqueue(request, entry, patient, outlook)
            if reply.refused.reason != wire.Refused.REASON_DEADLINE:
                return reply
            wait_ms = reply.refused.retry_after_ms + outlook.first_token_ms
            if other[1].total_ms < wait_ms:
                return _redirected(other[0], wait_ms, "too many requests wait for the model")
        return await self._enqueue(request, entry, room, outlook)

    def _instead(self, request: wire.SubmitRequest, model: Model, refused: wire.SubmitReply) -> wire.SubmitReply:
        """The fallback of a model that cannot run now, or the refusal."""
        other = self._outlooks.fallback(self._pools.catalogue.current, model, request)
        return refused if other is None else _redirected(other[0], 0, refused.refused.message)

    async def _enqueue(
        self, request: wire.SubmitRequest, entry: QueueEntry, room: Room, outlook: Outlook
    ) -> wire.SubmitReply:
        pool = _pool(request)
        try:
            answer = await self._dispatcher.enqueue(pool, entry, room)
        except Unavailable:
            return _refused(wire.Refused.REASON_UNAVAILABLE, "the queues cannot be reached now", RETRY_SOON_MS)
        match answer:
            case Queued(position, wait_ms):
                self._foresight.arrived(pool, entry.version)
                return wire.SubmitReply(accepted=_accepted(position, wait_ms, room, outlook))
            case Known(Standing.ENDED):
                return _refused(wire.Refused.REASON_UNAVAILABLE, "this attempt has ended")
            case Known():
                return wire.SubmitReply(accepted=wire.Accepted())
            case QueueFull(retry_after_ms, scope):
                message = f"too many requests{_WHOSE[scope[:2]]} are queued"
                return _refused(wire.Refused.REASON_QUEUE_FULL, message, retry_after_ms)
            case Shed(retry_after_ms):
                message = "batch work has to wait: the more urgent classes fill the model"
                return _refused(wire.Refused.REASON_QUEUE_FULL, message, retry_after_ms)
            case TooLate(wait_ms):
                message = f"it could not start before its deadline: the wait is about {wait_ms} ms"
                return _refused(wire.Refused.REASON_DEADLINE, message, wait_ms)


def _accepted(position: int, wait_ms: int, room: Room, outlook: Outlook) -> wire.Accepted:
    """The estimate as told to the caller: not the optimistic one that refusals are made from."""
    wait_ms = max(wait_ms, wait_ms - room.start_after_ms + outlook.expected.start_ms)
    return wire.Accepted(
        position=position,
        estimated_wait_ms=wait_ms,
        cold=not room.slots,
        reason=outlook.expected.reason,
        estimated_first_token_ms=wait_ms + outlook.first_token_ms,
    )


def _redirected(model: Model, wait_ms: int, reason: str) -> wire.SubmitReply:
    return wire.SubmitReply(
        redirected=wire.Redirected(
            model=model.name, model_digest=model.digest, estimated_wait_ms=wait_ms, reason=reason
        )
    )


def _pool(request: wire.SubmitRequest) -> PoolName:
    return PoolName(request.pool) if request.pool else DEFAULT_POOL


def _is_served(model: Model, request: wire.SubmitRequest, view: PoolView, version: VersionKey) -> bool:
    """Whether the version is the current one, or an older one that is still ready somewhere."""
    if model.digest == request.model_digest:
        return True
    found = (node.find(version) for node in view.nodes)
    return any(each is not None and each.residence is Residence.READY for each in found)


def _never_fits(model: Model, request: wire.SubmitRequest) -> str:
    """Why the request can never run on the model; empty if it can."""
    tokens = request.input_tokens + request.max_output_tokens
    if 0 < model.context_tokens < tokens:
        return f"prompt and output need {tokens} tokens; the model's context has {model.context_tokens}"
    if 0 < model.kv_pool_tokens < tokens:
        return f"prompt and output need {tokens} tokens; an instance can hold {model.kv_pool_tokens}"
    return ""


def _entry(request: wire.SubmitRequest, catalogue: Catalogue, outlook: Outlook) -> QueueEntry:
    kept = wire.SubmitRequest()
    kept.CopyFrom(request)
    kept.ClearField("block_keys")  # up to 200 KB that nobody reads again
    tenant = catalogue.tenants.get(TenantId(request.tenant_id))
    return QueueEntry(
        attempt=attempt_id(request.request_id, request.attempt),
        tenant_id=TenantId(request.tenant_id),
        version=outlook.spec.version,
        priority_class=PriorityClass.from_wire(request.priority_class),
        input_tokens=request.input_tokens,
        max_output_tokens=request.max_output_tokens,
        deadline_ms=request.deadline_unix_ms,
        weight_milli=max(1, round(1000 * tenant.weight)) if tenant else 1000,
        payload=kept.SerializeToString(),
        warm=outlook.prompt.warm,
        queues=tuple(QueueLimit(each.scope, each.requests, each.tokens) for each in request.queue_limits),
    )


def _room(catalogue: Catalogue, request: wire.SubmitRequest, slots: int, cold_ms: int) -> Room:
    name = TenantId(request.tenant_id)
    tenant = catalogue.tenants.get(name) or Tenant(name=name)
    return Room(tenant.limits.queued_requests, slots, cold_ms, tenant.limits.queued_tokens)


def _refused(reason: "wire.Refused.Reason.ValueType", message: str, retry_after_ms: int = 0) -> wire.SubmitReply:
    return wire.SubmitReply(refused=wire.Refused(reason=reason, message=message, retry_after_ms=retry_after_ms))
