"""How the admin API shows things: names in lower case, times in RFC 3339, sizes in bytes."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from roundhouse.catalogue.problems import DeclarationRefused
from roundhouse.catalogue.records import ScopeLimits
from roundhouse.wire.v1 import loading_pb2, vocabulary_pb2
from services.gateway.domain.keys import KeyRecord
from services.gateway.operations.apply import Applied
from services.gateway.operations.erase_cache import ErasedOnNode


def applied_json(applied: Applied) -> dict[str, Any]:
    """What came of a declaration."""
    changes = [
        {"action": change.action, "kind": change.kind, "name": change.name, "fields": list(change.fields)}
        for change in applied.changes
    ]
    return {
        "generation": applied.generation,
        "unchanged": applied.unchanged,
        "dry_run": applied.dry_run,
        "changes": changes,
    }


def problems_json(refused: DeclarationRefused) -> list[dict[str, Any]]:
    """Every problem of a declaration with its place."""
    return [
        {
            "file": problem.file,
            "line": problem.place.line,
            "column": problem.place.column,
            "reason": problem.reason,
        }
        for problem in refused.problems
    ]


def key_json(record: KeyRecord, state: str) -> dict[str, Any]:
    """A key without its text and without its hash."""
    return {
        "key_id": record.key_id,
        "tenant": record.tenant_id,
        "scopes": sorted(record.scopes),
        "label": record.label,
        "state": state,
        "created": _time(record.created_ms),
        "expires": _time(record.expires_ms),
        "revoked": _time(record.revoked_ms),
        "limits": _limits_json(record.limits),
        "replaces": record.replaces,
    }


def _limits_json(limits: ScopeLimits | None) -> dict[str, Any] | None:
    found: dict[str, Any] | None = msgspec.to_builtins(limits)
    return found


def node_json(state: loading_pb2.NodeState) -> dict[str, Any]:
    """A node with its memory and what it holds."""
    return {
        "node_id": state.node_id,
        "pool": state.pool,
        "role": _word(vocabulary_pb2.NodeRole.Name(state.role), "NODE_ROLE_"),
        "accepting": state.accepting,
        "unhealthy_reason": state.unhealthy_reason,
        "triton_grpc_address": state.triton_grpc_address,
        "loader_address": state.loader_address,
        "kvstore_address": state.kvstore_address,
        "device_count": state.device_count,
        "sent": _time(state.sent_unix_ms),
        "tiers": [_tier_json(tier) for tier in state.tiers],
        "devices": [_device_json(device) for device in state.devices],
        "instances": [_instance_json(instance) for instance in state.instances],
        "adapters": _adapters_json(state.adapters),
    }


def _adapters_json(state: loading_pb2.AdapterState) -> dict[str, Any]:
    return {
        "on_disk": state.on_disk,
        "in_host": state.in_host,
        "host_capacity": state.host_capacity,
        "host_resident": state.host_resident,
        "refused": [{"adapter": each.adapter, "base": each.base, "reason": each.reason} for each in state.refused],
    }


def _device_json(device: loading_pb2.Device) -> dict[str, Any]:
    return {
        "index": device.index,
        "uuid": device.uuid,
        "mig_profile": device.profile or None,
        "link_group": device.link_group,
        "capacity": device.capacity,
        "resident": device.resident,
        "reserved": device.reserved,
        "unaccounted": device.unaccounted,
    }


def _tier_json(tier: vocabulary_pb2.TierBytes) -> dict[str, Any]:
    return {
        "tier": _word(vocabulary_pb2.Tier.Name(tier.tier), "TIER_"),
        "capacity": tier.capacity,
        "resident": tier.resident,
        "reserved": tier.reserved,
        "bytes_per_second": tier.bytes_per_second,
    }


def _instance_json(instance: loading_pb2.Instance) -> dict[str, Any]:
    return {
        "model": instance.version.model,
        "digest": instance.version.digest,
        "triton_model_name": instance.triton_model_name,
        "state": _word(vocabulary_pb2.InstanceState.Name(instance.state), "INSTANCE_STATE_"),
        "device_bytes": instance.device_bytes,
        "slots": instance.slots,
        "since": _time(instance.state_since_unix_ms),
        "stage_ms": instance.stage_ms,
        "load_ms": instance.load_ms,
        "reason": instance.reason,
        "retry_at": _time(instance.retry_at_unix_ms),
        "tier": _word(vocabulary_pb2.Tier.Name(instance.tier), "TIER_"),
        "measured_bytes": instance.measured_bytes,
        "devices": list(instance.devices),
        "bytes_done": instance.bytes_done,
        "bytes_total": instance.bytes_total,
        "estimated_remaining_ms": instance.estimated_remaining_ms,
    }


def _word(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower()


def _time(unix_ms: int) -> str | None:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds") if unix_ms else None


def erasure_json(outcomes: Sequence[ErasedOnNode]) -> dict[str, Any]:
    """What each node dropped of a tenant; `erased` only if there are nodes and each counts 0 afterwards."""
    nodes = [
        {"node": node.node_id, "blocks": node.blocks, "blocks_left": node.blocks_left, "error": node.error}
        for node in outcomes
    ]
    return {"erased": bool(nodes) and not any(node.error or node.blocks_left for node in outcomes), "nodes": nodes}
