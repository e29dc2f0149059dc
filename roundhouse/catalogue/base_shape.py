"""The projections of a language model that adapters change, as its config.json tells them.

Only for the Llama family and what is built alike; nothing is guessed for others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ADAPTER_ELEMENT_BYTES = 2  # engines on GPUs hold adapters in the base's 16 bit


@dataclass(frozen=True, slots=True)
class BaseShape:
    """What of a base an adapter has to fit: layers, and `(outputs, inputs)` of each projection."""

    layers: int
    projections: Mapping[str, tuple[int, int]]


def base_shape(config: Mapping[str, Any]) -> BaseShape | None:
    """From a config.json of the Llama family; None if it does not tell."""
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers")
    found = [config.get(name) for name in names]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in found):
        return None
    hidden, inner, heads, layers = (int(config[name]) for name in names)
    size = int(config.get("head_dim") or hidden // heads)
    query, kv = heads * size, int(config.get("num_key_value_heads") or heads) * size
    return BaseShape(
        layers,
        {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        },
    )


def adapter_slot_bytes(shape: BaseShape | None, slots: int, rank: int) -> int:
    """Device memory that an engine takes at its start for `slots` adapters of `rank` on every projection.

    0 for a base that does not tell its projections: nothing fits it anyway."""
    if shape is None:
        return 0
    sides = sum(outputs + inputs for outputs, inputs in shape.projections.values())
    return slots * rank * sides * shape.layers * _ADAPTER_ELEMENT_BYTES
