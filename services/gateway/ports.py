"""What the gateway's operations need of the world. Adapters implement these; tests pass fakes.

Each fake passes the contract suite of the real adapter.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from roundhouse.catalogue.records import Limits
from roundhouse.vocabulary import KeyId, RequestId, TenantId
from roundhouse.wire.v1 import scheduling_pb2, usage_pb2


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a key belongs to. The only source of tenant identity (invariant 16)."""

    tenant_id: TenantId
    key_id: KeyId
    scopes: frozenset[str]  # "inference", "usage:read", "admin"
    key_hash: str  # SHA-256 of the key, hex; for the atomic check in `Admission.admit`


class KeyDirectory(Protocol):
    """Resolves key texts."""

    async def identify(self, key_text: str) -> Caller:
        """Who calls. Raises Unauthenticated (unknown, revoked or expired: one message for all), Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that passed every limit at once. `ticket` names its reservation; settle it exactly once."""

    ticket: RequestId
    tenant_id: TenantId
    reserved_tokens: int
    remaining_requests: int | None  # of the minute; None = unlimited
    remaining_tokens: int | None
    reset_requests_ms: int
    reset_tokens_ms: int


class Admission(Protocol):
    """Limits, checked all or nothing in one atomic step that also checks that the key is still alive."""

    async def admit(
        self, caller: Caller, request_id: RequestId, limits: Limits, *, input_tokens: int, reserve_tokens: int
    ) -> Admitted:
        """Take one request, `reserve_tokens` tokens and a concurrency lease.

        Raises Unauthenticated (key revoked meanwhile), LimitExceeded (with retry_after_ms; nothing was taken),
        BudgetExhausted, Unavailable. Idempotent by request_id."""
        ...

    async def settle(self, admitted: Admitted, *, used_tokens: int) -> None:
        """Give back the lease and what was reserved above `used_tokens`. Idempotent. Raises Unavailable."""
        ...

    async def renew(self, held: Sequence[Admitted]) -> None:
        """Keep the concurrency leases of running requests; called once a second. Raises Unavailable."""
        ...


class SchedulerGateway(Protocol):
    """The scheduler, over the bus."""

    async def submit(self, request: scheduling_pb2.SubmitRequest) -> scheduling_pb2.SubmitReply:
        """Queue a request. Raises Unavailable."""
        ...

    async def cancel(self, cancel: scheduling_pb2.Cancel) -> None:
        """Take a request out of its queue."""
        ...

    async def finished(self, finished: scheduling_pb2.Finished) -> None:
        """Release the slot and settle the service; repeated by `heartbeat`."""
        ...

    async def heartbeat(self, heartbeat: scheduling_pb2.Heartbeat) -> None:
        """Renew all leases of this gateway."""
        ...


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request to a language-model instance. Sampling parameters are validated before this is made."""

    request_id: RequestId
    text_input: str
    prompt_token_ids: tuple[int, ...]
    sampling_parameters: str  # JSON
    phase: str  # "full" or "embed"
    stream: bool
    salt: str  # hex; names the tenant's cache space
    adapter_path: str
    adapter_digest: str
    return_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class EngineChunk:
    """What an engine produced since the last chunk."""

    text: str
    output_tokens: int  # new tokens in this chunk
    input_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None  # set on the last chunk
    logprobs: str | None = None  # JSON list, one entry a token
    embedding: tuple[float, ...] | None = None


class InferenceNode(Protocol):
    """Triton nodes, addressed by the placement of a grant."""

    def generate(
        self, placement: scheduling_pb2.Placement, request: EngineRequest, *, timeout_ms: int
    ) -> AsyncIterator[EngineChunk]:
        """Stream chunks. Closing the iterator cancels the request on the node.

        Raises EngineFailed (with what the engine said, if it is for the caller: InvalidInput), DeadlinePassed."""
        ...


class UsageSink(Protocol):
    """Where usage events go so that they are not lost."""

    async def record(self, event: usage_pb2.UsageEvent) -> None:
        """Keep the event until the stream has it. Idempotent by event id."""
        ...
