"""One generation of the catalogue, as every service reads it. Immutable; looked up, never searched.

What a tenant may see: a model or adapter is visible if the tenant's `models` patterns match its name AND its own
access list has the tenant (or `*`); an adapter also needs its base to be one that exists. What is not visible does not
exist for that tenant (404, invariant 16).
"""

from enum import StrEnum
from fnmatch import fnmatchcase

import msgspec

from roundhouse.vocabulary import AdapterName, Digest, ModelName, PoolName, PriorityClass, TenantId


class Engine(StrEnum):
    """What Triton runs for a model. See ARCHITECTURE.md, "Engines"."""

    REFERENCE = "reference"
    VLLM = "vllm"
    ONNX = "onnx"
    TRITON = "triton"  # a complete Triton model folder


class Interface(StrEnum):
    """How a model is called."""

    LLM = "llm"  # text in, tokens out: the Triton model contract for language models
    TENSORS = "tensors"  # KServe v2 tensors passed through


DEDICATED_REPLICA = "dedicated-replica"  # instances of its own, on nodes and devices that others use too
DEDICATED_MIG = "dedicated-mig"  # instances of its own, on MIG slices that nobody else uses meanwhile


def is_address(source: str) -> bool:
    """Whether a source is an address, which loaders fetch from; else it is a path that they see."""
    return "://" in source


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one tenant; None = no such limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    queued_requests: int = 256
    queued_tokens: int = 2_000_000


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Money that may be spent in a period."""

    amount: str  # decimal
    currency: str = "USD"
    period: str = "month"


class ScopeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one key, or of one tenant on one model, beside the tenant's own; None = no such limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    queued_requests: int | None = None
    queued_tokens: int | None = None
    budget: Budget | None = None


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one tenant on the names that match a glob pattern; each name is counted by itself."""

    pattern: str
    limits: ScopeLimits


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """Price per million tokens, decimal strings."""

    id: str
    currency: str = "USD"
    input: str = "0"
    cached_input: str = "0"
    output: str = "0"
    priority_class: str = ""  # of which class of requests; empty = every class
    effective_from_ms: int | None = None  # Unix time; None = from when it is first seen


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A customer."""

    name: TenantId
    weight: float = 1.0
    priority_class: PriorityClass = PriorityClass.STANDARD
    limits: Limits = Limits()
    budget: Budget | None = None
    isolation: str = "shared"  # or `DEDICATED_REPLICA`, `DEDICATED_MIG`, or the pool that its requests run in
    fallback: bool = False  # a smaller model may answer when the promise of the one asked for would be broken
    models: tuple[str, ...] = ("*",)  # glob patterns of visible names

    @property
    def has_own_instances(self) -> bool:
        """Whether its requests share no instance with other tenants although they share the pool."""
        return self.isolation in (DEDICATED_REPLICA, DEDICATED_MIG)

    def pool_of(self, model: "Model") -> PoolName:
        """Where its requests for a model are placed: its own pool if it has one, else the model's."""
        return model.pool if self.isolation == "shared" or self.has_own_instances else PoolName(self.isolation)

    usage_retention_days: int | None = None  # how long single requests are kept in the ledger; None = for ever
    limits_per_model: tuple[ModelLimits, ...] = ()  # the first that matches counts
    sharing_group: str = ""  # whose cache it wants to share; the group has to list it too

    def model_limits(self, name: str) -> ScopeLimits | None:
        """What this tenant's declaration says of a model or adapter by its own name; None if nothing."""
        return next((one.limits for one in self.limits_per_model if fnmatchcase(name, one.pattern)), None)


class ContentFile(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One file of a version. A list of these is good if its digest is the version's, whoever brings it."""

    name: str  # relative to the version's folder, with `/`
    size: int  # bytes
    sha256: str  # 64 hexadecimal digits


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One model with its current version."""

    name: ModelName
    source_path: str  # absolute folder or file, or an address with a scheme
    engine: Engine
    interface: Interface
    digest: Digest  # over names and contents of the version's files
    files: tuple[ContentFile, ...] = ()  # what the digest is over; empty = found out when it is staged
    slots: int = 4  # requests an instance runs at once
    device_bytes: int = 0  # weights + workspace + KV pool of one instance
    kv_pool_tokens: int = 0
    context_tokens: int = 0  # prompt + output; 0 = not a language model
    tokenizer_path: str = ""  # folder with tokenizer.json; empty = none
    derived: tuple[str, ...] = ()  # the sizes above that the declaration leaves to the files, by field name
    pool: PoolName = PoolName("shared")
    ttft_slo_ms: int = 2_000
    cold_start_slo_ms: int = 60_000
    pinned: bool = False
    min_replicas: int = 0
    tensor_parallel: int = 1  # devices of one link group that an instance takes, `device_bytes` shared evenly
    adapter_slots: int = 0  # vLLM: adapters that one step of the engine may mix; 0 = none are served
    adapter_rank_max: int = 16  # vLLM: the highest rank it has room for
    fallback: ModelName | None = None  # answers instead when this one's promise would be broken and the tenant allows
    access: tuple[str, ...] = ("*",)  # tenant names
    price: Price | None = None
    prices: tuple[Price, ...] = ()  # further ones: of one class, or from an instant on
    tenant_limits: ScopeLimits | None = (
        None  # of each tenant on this model, unless the tenant's declaration says otherwise
    )


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """LoRA weights over a base model."""

    name: AdapterName
    base: ModelName
    source_path: str
    digest: Digest
    base_digest: Digest | None = None  # the one version of the base that it was made for; None = whichever it fits
    files: tuple[ContentFile, ...] = ()
    tenant: TenantId | None = None  # None = shared
    price: Price | None = None
    prices: tuple[Price, ...] = ()


class SharingGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Tenants that share the cache of beginnings which all of them know: prompts that are declared here."""

    name: str
    tenants: tuple[TenantId, ...]  # whom it accepts
    prompts: tuple[str, ...]  # system prompts, or beginnings of completions


class Pin(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's word, beside the declaration, that a model stays on devices; it outlives the next declarations."""

    min_replicas: int = 1  # ready at all times


class Catalogue(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. Names are unique across models and adapters."""

    generation: int = 0
    tenants: dict[TenantId, Tenant] = {}
    models: dict[ModelName, Model] = {}
    adapters: dict[AdapterName, Adapter] = {}
    sharing_groups: dict[str, SharingGroup] = {}
    pins: dict[ModelName, Pin] = {}

    def is_pinned(self, model: Model) -> bool:
        """Whether it never leaves the devices for another: declared so, or pinned by an operator. O(1)."""
        return model.pinned or model.name in self.pins

    def least_replicas(self, model: Model) -> int:
        """How many instances stand ready at all times, at least. O(1)."""
        pin = self.pins.get(model.name)
        return max(model.min_replicas, pin.min_replicas if pin is not None else 0)

    def sharing_group_of(self, tenant_id: TenantId) -> SharingGroup | None:
        """The group that a tenant has chosen and that accepts it: both, or none. O(1)."""
        tenant = self.tenants.get(tenant_id)
        group = self.sharing_groups.get(tenant.sharing_group) if tenant is not None else None
        return group if group is not None and tenant_id in group.tenants else None

    def resolve(self, tenant_id: TenantId, name: str) -> tuple[Model, Adapter | None] | None:
        """The model that serves `name` for a tenant and the adapter over it; None if it may see none. O(1)."""
        tenant = self.tenants.get(tenant_id)
        if tenant is None or not any(fnmatchcase(name, pattern) for pattern in tenant.models):
            return None
        adapter = self.adapters.get(AdapterName(name))
        if adapter is not None:
            base = self.models.get(adapter.base)
            if base is None or adapter.tenant not in (None, tenant_id):
                return None
            return base, adapter
        model = self.models.get(ModelName(name))
        if model is None or not ("*" in model.access or tenant_id in model.access):
            return None
        return model, None

    def fallback_of(self, tenant_id: TenantId, model: Model) -> Model | None:
        """The model that may answer instead, if the tenant sees it; fallbacks do not chain. O(1)."""
        found = self.resolve(tenant_id, model.fallback) if model.fallback else None
        return found[0] if found is not None and found[1] is None else None

    def pool_of(self, tenant_id: TenantId, model: Model) -> PoolName:
        """Where a tenant's requests for a model are placed: its own pool if it has one, else the model's."""
        tenant = self.tenants.get(tenant_id)
        return model.pool if tenant is None else tenant.pool_of(model)

    def visible_names(self, tenant_id: TenantId) -> list[str]:
        """Every name that `resolve` finds for this tenant, sorted. O(names)."""
        names = [*self.models, *self.adapters]
        return sorted(name for name in names if self.resolve(tenant_id, name) is not None)


EMPTY = Catalogue()
