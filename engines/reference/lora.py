"""Low-rank adapters in PEFT format, applied a request: rows of the same adapter share one small product.

An adapter adds `scaling * B @ A` to a projection; `scaling` is folded into B when it is loaded. Everything is checked
against the base at load, so a bad adapter fails the request that names it and nothing else. Source: Hu et al., LoRA
(arXiv 2106.09685), section 4.1; file layout of `peft` `save_pretrained`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from engines.reference.model_config import ModelConfig
from engines.reference.tiled_matmul import TiledMatrix, pad_rows

Array = NDArray[np.float32]
Group = Literal["qkv", "out", "gate_up", "down"]


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """The low-rank change of one projection: columns `start:stop` of its group's product."""

    down: TiledMatrix
    up: TiledMatrix
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """One loaded adapter: its changes by layer and group of projections."""

    name: str
    rank: int
    deltas: Mapping[tuple[int, Group], tuple[LoraDelta, ...]]
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Which rows of a step use which adapter."""

    groups: tuple[tuple[LoraAdapter, NDArray[np.intp]], ...] = field(default=())

    @staticmethod
    def of(spans: Sequence[tuple[LoraAdapter | None, int, int]]) -> LoraRows:
        """Group row spans by adapter; rows without one are in no group."""
        rows: dict[int, tuple[LoraAdapter, list[NDArray[np.intp]]]] = {}
        for adapter, start, stop in spans:
            if adapter is not None:
                rows.setdefault(id(adapter), (adapter, []))[1].append(np.arange(start, stop, dtype=np.intp))
        return LoraRows(tuple((adapter, np.concatenate(parts)) for adapter, parts in rows.values()))

    def apply(self, product: Array, x: Array, layer: int, group: Group) -> Array:
        """Add each adapter's change of `x` `[rows, K]` to `product` `[rows, N]`."""
        if not self.groups:
            return product
        changed = np.array(product, order="C")
        for adapter, rows in self.groups:
            deltas = adapter.deltas.get((layer, group), ())
            selected = pad_rows(x[rows]) if deltas else x
            for delta in deltas:
                changed[rows, delta.start : delta.stop] += delta.up(delta.down(selected))[: len(rows)]
        return changed


@dataclass(frozen=True, slots=True)
class Projection:
    """Where a projection that adapters may target lies in its group, and its size."""

    group: Group
    start: int
    outputs: int
    inputs: int


def projections(config: ModelConfig) -> dict[str, Projection]:
    """The projections of a layer by the names PEFT uses (with their parent module)."""
    hidden, inner, query, kv = config.hidden_size, config.intermediate_size, config.query_size, config.kv_size
    return {
        "self_attn.q_proj": Projection("qkv", 0, query, hidden),
        "self_attn.k_proj": Projection("qkv", query, kv, hidden),
        "self_attn.v_proj": Projection("qkv", query + kv, kv, hidden),
        "self_attn.o_proj": Projection("out", 0, hidden, query),
        "mlp.gate_proj": Projection("gate_up", 0, inner, hidden),
        "mlp.up_proj": Projection("gate_up", inner, inner, hidden),
        "mlp.down_proj": Projection("down", 0, hidden, inner),
    }
