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


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one tenant; None = no such limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    queued_requests: int = 256


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Money a tenant may spend in a period."""

    amount: str  # decimal
    currency: str = "USD"
    period: str = "month"


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """Price per million tokens, decimal strings."""

    id: str
    currency: str = "USD"
    input: str = "0"
    cached_input: str = "0"
    output: str = "0"


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A customer."""

    name: TenantId
    weight: float = 1.0
    priority_class: PriorityClass = PriorityClass.STANDARD
    limits: Limits = Limits()
    budget: Budget | None = None
    isolation: str = "shared"  # or the name of the pool that its requests run in
    models: tuple[str, ...] = ("*",)  # glob patterns of visible names


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One model with its current version."""

    name: ModelName
    source_path: str  # absolute folder or file
    engine: Engine
    interface: Interface
    digest: Digest  # over names and contents of the version's files
    slots: int = 4  # requests an instance runs at once
    device_bytes: int = 0  # weights + workspace + KV pool of one instance
    kv_pool_tokens: int = 0
    context_tokens: int = 0  # prompt + output; 0 = not a language model
    tokenizer_path: str = ""  # folder with tokenizer.json; empty = none
    pool: PoolName = PoolName("shared")
    ttft_slo_ms: int = 2_000
    cold_start_slo_ms: int = 60_000
    pinned: bool = False
    min_replicas: int = 0
    access: tuple[str, ...] = ("*",)  # tenant names
    price: Price | None = None


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """LoRA weights over a base model."""

    name: AdapterName
    base: ModelName
    source_path: str
    digest: Digest
    tenant: TenantId | None = None  # None = shared
    price: Price | None = None


class Catalogue(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. Names are unique across models and adapters."""

    generation: int = 0
    tenants: dict[TenantId, Tenant] = {}
    models: dict[ModelName, Model] = {}
    adapters: dict[AdapterName, Adapter] = {}

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

    def visible_names(self, tenant_id: TenantId) -> list[str]:
        """Every name that `resolve` finds for this tenant, sorted. O(names)."""
        names = [*self.models, *self.adapters]
        return sorted(name for name in names if self.resolve(tenant_id, name) is not None)


EMPTY = Catalogue()
