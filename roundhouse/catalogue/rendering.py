"""A catalogue → the declaration that makes it, so that what is shown can be edited and applied.

The inverse of `assembly`: applied where the same files lie, it makes the same records. What the declaration left to
the files (`Model.derived`) is left out again, so that it follows them; defaults are written out. Pins are no part of
it: they are an operator's word beside the declaration. Decision: docs/decisions/0161-what-is-shown-can-be-applied.md.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, assert_never

import msgspec

from roundhouse.catalogue.records import (
    Adapter,
    Catalogue,
    Model,
    Price,
    ScopeLimits,
    SharingGroup,
    Tenant,
    is_address,
)

Entry = dict[str, Any]
"""Plain data in the words of a declaration; a key that would say nothing is left out."""


def declaration_of(catalogue: Catalogue) -> Entry:
    """The whole file. O(names)."""
    sections: dict[str, Mapping[Any, Tenant | Model | Adapter | SharingGroup]] = {
        "tenants": catalogue.tenants,
        "models": catalogue.models,
        "adapters": catalogue.adapters,
        "sharing_groups": catalogue.sharing_groups,
    }
    written = {name: [entry_of(item) for item in items.values()] for name, items in sections.items() if items}
    return {"version": 1, **written}


def entry_of(record: Tenant | Model | Adapter | SharingGroup) -> Entry:
    """One item of a section."""
    match record:
        case Tenant():
            return _tenant(record)
        case Model():
            return _model(record)
        case Adapter():
            return _adapter(record)
        case SharingGroup():
            return {"name": record.name, "tenants": list(record.tenants), "prompts": list(record.prompts)}
        case _:
            assert_never(record)


def _tenant(tenant: Tenant) -> Entry:
    per_model = [{"model": each.pattern, **_scope(each.limits)} for each in tenant.limits_per_model]
    return _said(
        name=tenant.name,
        weight=tenant.weight,
        **{"class": tenant.priority_class.value},
        limits=_said(**msgspec.to_builtins(tenant.limits)),
        limits_per_model=per_model or None,
        budget=None if tenant.budget is None else msgspec.to_builtins(tenant.budget),
        isolation=tenant.isolation,
        fallback=tenant.fallback,
        models=list(tenant.models),
        usage_retention_days=tenant.usage_retention_days,
        sharing_group=tenant.sharing_group or None,
    )


def _model(model: Model) -> Entry:
    given: Entry = {
        name: getattr(model, name) for name in ("device_bytes", "kv_pool_tokens", "context_tokens", "tokenizer_path")
    }
    given = {name: value for name, value in given.items() if name not in model.derived}
    return _said(
        name=model.name,
        source=_source(model),
        engine=model.engine.value,
        interface=model.interface.value,
        slots=model.slots,
        memory=_said(device=given.get("device_bytes", "auto"), kv_pool_tokens=given.get("kv_pool_tokens")),
        adapter_slots=model.adapter_slots,
        adapter_rank_max=model.adapter_rank_max,
        tensor_parallel=model.tensor_parallel,
        fallback=model.fallback,
        context_tokens=given.get("context_tokens") or None,  # 0: it is no language model
        tokenizer=given.get("tokenizer_path") or None,
        pool=model.pool,
        slo={"time_to_first_token_ms": model.ttft_slo_ms, "cold_start_ms": model.cold_start_slo_ms},
        residency={"pinned": model.pinned, "min_replicas": model.min_replicas},
        access={"tenants": list(model.access)},
        tenant_limits=None if model.tenant_limits is None else _scope(model.tenant_limits),
        **_prices(model),
    )


def _adapter(adapter: Adapter) -> Entry:
    return _said(
        name=adapter.name,
        base=adapter.base,
        source=_source(adapter),
        base_digest=adapter.base_digest,
        tenant=adapter.tenant,
        **_prices(adapter),
    )


def _source(item: Model | Adapter) -> Entry:
    if not is_address(item.source_path):
        return {"path": item.source_path}  # its files are read again
    files = [{"name": each.name, "size": each.size, "sha256": each.sha256} for each in item.files]
    return {"path": item.source_path, "files": files}


def _scope(limits: ScopeLimits) -> Entry:
    return _said(**msgspec.to_builtins(limits))


def _prices(item: Model | Adapter) -> Entry:
    return {
        "price": None if item.price is None else _price(item.price),
        "prices": [_price(each) for each in item.prices] or None,
    }


def _price(price: Price) -> Entry:
    starts = None if price.effective_from_ms is None else _instant(price.effective_from_ms)
    return _said(
        id=price.id,
        **{"class": price.priority_class or None, "from": starts},
        input=price.input,
        cached_input=price.cached_input,
        output=price.output,
        currency=price.currency,
    )


def _instant(unix_ms: int) -> str:
    when = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=unix_ms)
    return when.isoformat(timespec="milliseconds" if unix_ms % 1_000 else "seconds").replace("+00:00", "Z")


def _said(**values: Any) -> Entry:
    return {name: value for name, value in values.items() if value is not None}
