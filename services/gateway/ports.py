"""What the gateway's operations need of the world. Adapters implement these; tests pass fakes.

Each fake passes the contract suite of the real adapter.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from roundhouse.block_keys import OWN_SPACE_ONLY, SharedBeginning
from roundhouse.catalogue.records import Limits, Model, ScopeLimits
from roundhouse.errors import EngineFailed
from roundhouse.vocabulary import KeyId, Outcome, RequestId, TenantId
from roundhouse.wire.v1 import scheduling_pb2, usage_pb2
from services.gateway.domain.budgets import Money
from services.gateway.domain.limits import ScopedLimits
from services.gateway.domain.tensors import ModelSignature, Tensor

NO_COSTS: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a key belongs to. The only source of tenant identity (invariant 16)."""

    tenant_id: TenantId
    key_id: KeyId
    scopes: frozenset[str]  # "inference", "usage:read", "admin"
    key_hash: str  # SHA-256 of the key, hex; for the atomic check in `Admission.admit`; empty = an issuer's token
    limits: ScopeLimits | None = None  # of this key alone, beside its tenant's
    family: KeyId | None = None  # the first of the keys that this one replaced; its budget goes on
    expires_ms: int = 0  # of an issuer's token, Unix time; 0 = never. Keys have theirs in the store


class KeyDirectory(Protocol):
    """Resolves key texts."""

    async def identify(self, key_text: str, *, fresh: bool = False) -> Caller:
        """Who calls. Raises Unauthenticated (unknown, revoked or expired: one message for all), Unavailable.

        `fresh` asks the store whether the key is still alive: for what does not go through `Admission.admit`, which
        asks by itself. Without it a revoked key may be named for a second more."""
        ...


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that passed every limit at once. `ticket` names its reservation; settle it exactly once."""

    ticket: RequestId
    tenant_id: TenantId
    reserved_tokens: int
    remaining_requests: int | None  # of the minute, in the scope with least left; None = unlimited
    remaining_tokens: int | None
    reset_requests_ms: int
    reset_tokens_ms: int
    requests_limit: int | None = None  # of that scope
    tokens_limit: int | None = None


class Admission(Protocol):
    """Limits, checked all or nothing in one atomic step that also checks that the key is still alive."""

    async def admit(
        self,
        caller: Caller,
        request_id: RequestId,
        limits: Limits,
        *,
        input_tokens: int,
        reserve_tokens: int,
        also: Sequence[ScopedLimits] = (),
        money: Sequence[Money] = (),
    ) -> Admitted:
        """Take one request, `reserve_tokens` tokens and a concurrency lease of the tenant and of each scope in `also`.

        `reserve_tokens` is the whole reservation, the prompt's `input_tokens` included. Raises Unauthenticated (key
        revoked meanwhile), LimitExceeded (nothing was taken; without retry_after_ms if waiting does not help),
        BudgetExhausted (one of `money`, the most that it may cost for each budget, does not fit beside what was spent
        and what other running requests may cost), Conflict (this id was settled before), Unavailable. Idempotent by
        request_id. A cancelled call leaves nothing counted."""
        ...

    async def withdraw(self, tenant_id: TenantId, request_id: RequestId) -> None:
        """Undo an admission entirely, its count of one request too (invariant 15). Idempotent. Raises Unavailable."""
        ...

    async def settle(self, admitted: Admitted, *, used_tokens: int, costs: Mapping[str, int] = NO_COSTS) -> None:
        """Give back the lease and what was reserved above `used_tokens` and `costs`: micro-units of money by scope.

        A cost is held until the ledger has counted it. Idempotent. Raises Unavailable."""
        ...

    async def renew(self, held: Sequence[Admitted]) -> None:
        """Keep the concurrency leases of running requests; called once a second. Raises Unavailable."""
        ...


class SchedulerGateway(Protocol):
    """The scheduler, over the bus."""

    async def submit(
        self, request: scheduling_pb2.SubmitRequest, *, timeout_ms: int, to_all: bool = False
    ) -> scheduling_pb2.SubmitReply:
        """Queue a request. Idempotent by (request_id, attempt). Raises Unavailable, also when none answers in time.

        One replica by chance is asked, which may be a frozen one until the bus drops it; or all, and one answer is
        enough."""
        ...

    async def cancel(self, cancel: scheduling_pb2.Cancel) -> None:
        """Take a request out of its queue. Raises Unavailable."""
        ...

    async def finished(self, finished: scheduling_pb2.Finished) -> None:
        """Release the slot and settle the service; repeated by `heartbeat`. Raises Unavailable."""
        ...

    async def lost(self, node_id: str) -> None:
        """Have every scheduler leave a node out for a moment. Raises Unavailable."""
        ...

    async def heartbeat(self, heartbeat: scheduling_pb2.Heartbeat) -> None:
        """Renew all leases of this gateway. Raises Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request to a language-model instance. Sampling parameters are validated before this is made."""

    request_id: RequestId
    text_input: str
    prompt_token_ids: tuple[int, ...]
    sampling_parameters: str  # JSON
    phase: str  # "full" or "embed"; "prefill" and "decode" where two instances share the work
    stream: bool
    salt: str  # hex; names the tenant's cache space
    adapter_path: str  # on the node; whoever sends it there finds it out
    adapter_digest: str
    adapter_name: str = ""
    tenant_id: TenantId = TenantId("")  # noqa: RUF009 - an empty text
    return_logprobs: bool = False
    return_token_ids: bool = False
    resumed_token_ids: tuple[int, ...] = ()  # generated by another instance: go on after them
    kv_peers: tuple[str, ...] = ()  # kvstores that have blocks of its prompt
    kv_hold: str = ""  # under which the first of them holds those blocks for it
    shared_salt: str = ""  # hex; of the cache space of a sharing group
    shared_tokens: int = 0  # so many leading tokens of the prompt lie there


@dataclass(frozen=True, slots=True)
class EngineChunk:
    """What an engine produced since the last chunk."""

    text: str
    output_tokens: int  # new tokens in this chunk
    input_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = (
        None  # set on the last chunk; HANDOFF after a prefill that another instance goes on from
    )
    logprobs: str | None = None  # JSON list, one entry a token
    embedding: tuple[float, ...] | None = None
    prompt_logprobs: str | None = None  # with the first chunk, if asked for: JSON list, one entry a prompt token
    token_ids: bytes = b""  # if asked for and known: int32, little-endian, one a token


HANDOFF = "handoff"


@dataclass(frozen=True, slots=True)
class TensorRequest:
    """One call of a tensor model. Tensors agree with their shapes before this is made (case B43)."""

    request_id: RequestId
    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...]  # names asked for; empty = all


@dataclass(frozen=True, slots=True)
class TensorReply:
    """The answer to a `TensorRequest`."""

    outputs: tuple[Tensor, ...]


class InstanceBroken(EngineFailed):
    """The instance is dead: no request will work there until its model is unloaded and loaded again."""


class NodeLost(EngineFailed):
    """The connection to the node broke off, or could not be made: another node may run the request."""


class NodeLeft(EngineFailed):
    """The stream left its node because that is being emptied: another node goes on with it."""


class InferenceNode(Protocol):
    """Triton nodes, addressed by the placement of a grant."""

    def generate(
        self, placement: scheduling_pb2.Placement, request: EngineRequest, *, timeout_ms: int
    ) -> AsyncGenerator[EngineChunk, None]:
        """Stream chunks. Closing the iterator, or cancelling its reader, cancels the request on the node.

        Raises InvalidInput (what the engine says is the caller's fault), DeadlinePassed, EngineFailed (anything else,
        also a node that is away)."""
        ...

    async def infer(
        self, placement: scheduling_pb2.Placement, request: TensorRequest, *, timeout_ms: int
    ) -> TensorReply:
        """One call of a tensor model. Cancellation cancels it on the node. Raises as `generate`."""
        ...


@dataclass(frozen=True, slots=True)
class FoundAdapter:
    """How a request names its adapter to an instance."""

    path: str
    engine_name: str = ""  # vLLM knows adapters by names that its loader gave out; empty = by the path


class AdapterPlaces(Protocol):
    """The loaders, where a request needs an adapter on their nodes."""

    async def find(
        self, placement: scheduling_pb2.Placement, request: EngineRequest, *, timeout_ms: int
    ) -> FoundAdapter:
        """Where the instance finds the request's adapter, which is there now, fits, and stays for `timeout_ms`.

        Raises NotFound, InvalidInput (it does not fit its base, and why), Unavailable, DeadlinePassed."""
        ...

    def forget(self, placement: scheduling_pb2.Placement, request: EngineRequest) -> None:
        """What was found did not help: ask anew the next time."""
        ...


class BlockTransfer(Protocol):
    """One prompt's blocks on their way from the node that computes them. Nothing here waits or raises: what is lost on
    the way is a miss."""

    def prefilled(self) -> None:
        """The prompt is computed: hold what is not at the other node yet, until it is. The hold ends by itself."""
        ...

    def end(self) -> None:
        """Nobody comes for them any more, or they have arrived: stop moving and holding. Idempotent."""
        ...


class BlockHolds(Protocol):
    """Moves a prefill's blocks to the node that decodes, and keeps them until they are there."""

    def begin(self, source: str, target: str, held: "HeldBlocks") -> BlockTransfer:
        """Have the kvstore `target` take a chain from `source` as it is computed there. Returns at once."""
        ...


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """A chain of blocks of a prompt in the space of a tenant, and the name it is held under."""

    salt: bytes
    keys: tuple[bytes, ...]
    handle: str
    shared: SharedBeginning = OWN_SPACE_ONLY
    prompt: tuple[int, ...] = ()


class SignatureSource(Protocol):
    """What is known of the tensors of models."""

    async def signature(self, model: Model) -> ModelSignature | None:
        """Inputs and outputs of the current version; None if they cannot be known without loading it."""
        ...


class AttemptJournal(Protocol):
    """Where the counts of one running attempt are kept, so that they outlive this process."""

    def note(self, input_tokens: int, cached_tokens: int, output_tokens: int) -> None:
        """So much was taken from the engine. Call before a piece is handed on. Never raises, never waits."""
        ...


class UsageSink(Protocol):
    """Where usage events go so that they are not lost."""

    @property
    def has_room(self) -> bool:
        """Whether there is room for the events of one more request; without it new work is refused."""
        ...

    @property
    def full_reason(self) -> str:
        """Why there is no room, for the caller; empty while there is."""
        ...

    def begin(self, started: usage_pb2.UsageEvent, pool: str) -> AttemptJournal:
        """An attempt runs from now on; `record` with the same event id ends it.

        If this process is killed in between, its successor records the event as of the last note."""
        ...

    async def record(self, event: usage_pb2.UsageEvent) -> None:
        """Keep the event until the stream has it. Idempotent by event id. Does not wait for the stream."""
        ...


class RequestObserver(Protocol):
    """Hears of the life of requests, for metrics. Never raises."""

    def started(self, operation: str, model: str) -> None:
        """A request was admitted."""
        ...

    def queued(self, model: str, change: int) -> None:
        """`change` (+1 or -1) requests wait for a grant."""
        ...

    def ended(self, ended: "RequestEnded") -> None:
        """An admitted request ended."""
        ...


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """How one admitted request went."""

    operation: str
    model: str
    outcome: Outcome
    error_type: str  # empty = no error
    total_ms: int
    first_token_ms: int | None  # from admission
    queue_ms: int
    output_tokens: int


class TextCodec(Protocol):
    """Tokenizer and chat template of one model version."""

    vocabulary_size: int

    @property
    def renders_tools(self) -> bool:
        """Whether the chat template has a place for tools."""
        ...

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[tuple[int, ...]]:
        """Token ids of each text. Much text is encoded off the event loop."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids."""
        ...

    def without_leading(self, text: str, token_ids: Sequence[int]) -> str:
        """What to send of `text` to an engine that begins every text with the model's special tokens by itself, so that
        it makes `token_ids` of it."""
        ...

    def with_leading(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that such an engine makes: with the special ones before them, unless they begin so already."""
        ...

    async def render_chat(self, messages: Sequence[object], tools: Sequence[object] | None) -> str:
        """The prompt of a conversation. Raises InvalidInput when the template refuses it or there is none."""
        ...


class TextCodecs(Protocol):
    """Codecs of all models, loaded when first needed."""

    async def codec(self, model: Model) -> TextCodec:
        """The codec of the model's current version. Raises Unavailable if its files cannot be read."""
        ...
