"""The demo's `catalogue.yaml`: who the tenants are, and what each may call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TENANTS = 40
NAMED_TENANTS = ("acme", "globex")
LIMITS = {
    "requests_per_minute": 600,
    "tokens_per_minute": 200_000,
    "concurrent_requests": 128,  # a loud tenant of the demo fills its queue instead of being refused
    "queued_requests": 256,
}
PRICES = {
    "base": {"id": "base-1", "input": "0.10", "cached_input": "0.05", "output": "0.40", "currency": "USD"},
    "fine-tune": {"id": "fine-tune-1", "input": "0.20", "cached_input": "0.10", "output": "0.80", "currency": "USD"},
}  # per million tokens; made up, so that bills have amounts
BASE_POOL_TOKENS = 4096
FINE_TUNE_POOL_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A base (`base` is its own name), a fine-tune of one, or a classifier (`base` is None)."""

    name: str
    base: str | None
    slots: int
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class DemoAdapter:
    """A LoRA adapter of one tenant."""

    name: str
    base: str
    tenant: str


def tenant_names() -> tuple[str, ...]:
    """`acme`, `globex`, `tenant-03` to `tenant-40`."""
    return (*NAMED_TENANTS, *(f"tenant-{number:02d}" for number in range(len(NAMED_TENANTS) + 1, TENANTS + 1)))


def catalogue_yaml(tenants: Sequence[str], models: Sequence[DemoModel], adapters: Sequence[DemoAdapter]) -> str:
    """The catalogue as text; the same input gives the same bytes."""
    import yaml

    document = {
        "version": 1,
        "tenants": [_tenant(name) for name in tenants],
        "models": [_model(model) for model in models],
        "adapters": [_adapter(adapter) for adapter in adapters],
    }
    head = "# Demo catalogue, written by engines.demo_models. Paths are relative to this file.\n"
    return head + str(yaml.safe_dump(document, sort_keys=False, width=120))


def _tenant(name: str) -> dict[str, Any]:
    visible = ["base-*", "classifier-*", f"{name}-*"]
    return {"name": name, "weight": 1, "class": "standard", "limits": dict(LIMITS), "models": visible}


def _model(model: DemoModel) -> dict[str, Any]:
    if model.base is None:
        kind: dict[str, Any] = {"engine": "onnx", "interface": "tensors"}
        memory: dict[str, Any] = {"device": "auto"}
    else:
        kind = {"engine": "reference", "interface": "llm"}
        pool_tokens = BASE_POOL_TOKENS if model.tenant is None else FINE_TUNE_POOL_TOKENS
        memory = {"device": "auto", "kv_pool_tokens": pool_tokens}
    return {
        "name": model.name,
        "source": {"path": f"models/{model.name}"},
        **kind,
        "slots": model.slots,
        "memory": memory,
        "access": {"tenants": ["*"] if model.tenant is None else [model.tenant]},
        "price": dict(PRICES["base" if model.tenant is None else "fine-tune"]),
    }


def _adapter(adapter: DemoAdapter) -> dict[str, Any]:
    return {
        "name": adapter.name,
        "base": adapter.base,
        "source": {"path": f"adapters/{adapter.name}"},
        "tenant": adapter.tenant,
        "price": dict(PRICES["fine-tune"]),
    }
