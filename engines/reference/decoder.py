"""The Llama decoder in NumPy: embeddings in, final hidden states and logits out.

Rows of all sequences of a step are computed together; only attention is per sequence. A row's result does not depend
on the other rows (see `tiled_matmul` and `attention`). Source of the arithmetic: Touvron et al., LLaMA
(arXiv 2302.13971), section 2.2, and the layout of `transformers` `modeling_llama.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.reference.attention import attend
from engines.reference.lora import LoraAdapter, LoraRows
from engines.reference.model_config import ModelConfig
from engines.reference.paged_kv import BlockPool, BlockTable
from engines.reference.rotary import RotaryTable
from engines.reference.tiled_matmul import pad_rows, padded_rows
from engines.reference.weights import DecoderWeights, LayerWeights

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sequence to compute in this step, beginning at position `first`."""

    token_ids: Sequence[int]
    first: int
    table: BlockTable
    adapter: LoraAdapter | None = None


class Decoder:
    """One model: its weights and its block pool. Not thread-safe; the step thread owns it."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, pool: BlockPool, positions: int) -> None:
        """Serve `positions` positions at most, whatever the configuration says the model was made for."""
        self.config = config
        self.pool = pool
        self._weights = weights
        self._rotary = RotaryTable(config, positions)

    def forward(self, segments: Sequence[Segment]) -> Array:
        """Compute the segments, writing their K and V to the pool; final hidden states, `[rows, hidden]`, in order."""
        step = _Step.of(segments)
        hidden = np.zeros((padded_rows(step.rows), self.config.hidden_size), np.float32)
        hidden[: step.rows] = self._weights.embedding[step.token_ids]
        for index, layer in enumerate(self._weights.layers):
            hidden += self._attention(step, index, layer, hidden)
            hidden += self._mlp(step, index, layer, hidden)
        return self._norm(hidden, self._weights.final_norm)[: step.rows]

    def logits(self, hidden: Array) -> Array:
        """Scores over the vocabulary of each row of `hidden`: `[rows, vocab]`."""
        return self._weights.head(pad_rows(hidden))[: len(hidden)]

    def _attention(self, step: _Step, index: int, layer: LayerWeights, hidden: Array) -> Array:
        config, rows = self.config, step.rows
        normed = self._norm(hidden, layer.input_norm)
        qkv = step.lora.apply(layer.qkv(normed), normed, index, "qkv")
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias
        heads = qkv[:rows].reshape(rows, -1, config.head_dim)
        turned = self._rotary.rotate(heads[:, : config.heads + config.kv_heads], step.positions)
        self.pool.write(index, step.slots, turned[:, config.heads :], heads[:, config.heads + config.kv_heads :])
        queries = turned[:, : config.heads].reshape(rows, config.kv_heads, -1, config.head_dim)
        mixed = np.zeros((len(hidden), config.query_size), np.float32)
        for segment, start, stop in step.spans:
            mixed[start:stop] = attend(queries[start:stop], segment.first, self.pool, index, segment.table)
        out = step.lora.apply(layer.out(mixed), mixed, index, "out")
        return out if layer.out_bias is None else out + layer.out_bias

    def _mlp(self, step: _Step, index: int, layer: LayerWeights, hidden: Array) -> Array:
        normed = self._norm(hidden, layer.post_norm)
        gate_up = step.lora.apply(layer.gate_up(normed), normed, index, "gate_up")
        if layer.gate_up_bias is not None:
            gate_up = gate_up + layer.gate_up_bias
        gate, up = gate_up[:, : self.config.intermediate_size], gate_up[:, self.config.intermediate_size :]
        inner = silu(gate) * up
        down = step.lora.apply(layer.down(inner), inner, index, "down")
        return down if layer.down_bias is None else down + layer.down_bias

    def _norm(self, x: Array, weight: Array) -> Array:
        """Root-mean-square normalisation of each row."""
        mean_square = np.square(x).mean(axis=-1, keepdims=True)
        normed: Array = x * (1.0 / np.sqrt(mean_square + np.float32(self.config.rms_norm_eps))) * weight
        return normed


def silu(x: Array) -> Array:
    """x times its logistic; exp of a large negative input overflows to inf, which gives the right limit, 0."""
    with np.errstate(over="ignore"):
        activated: Array = x / (1.0 + np.exp(-x))
    return activated


@dataclass(frozen=True, slots=True)
class _Step:
    """What is the same for every layer of one forward pass."""

    rows: int
    token_ids: NDArray[np.intp]
    positions: NDArray[np.intp]
    slots: NDArray[np.intp]
    spans: tuple[tuple[Segment, int, int], ...]
    lora: LoraRows

    @staticmethod
    def of(segments: Sequence[Segment]) -> _Step:
        spans, rows = [], 0
        for segment in segments:
            spans.append((segment, rows, rows + len(segment.token_ids)))
            rows += len(segment.token_ids)
        sizes = [(segment.first, segment.first + len(segment.token_ids)) for segment in segments]
        return _Step(
            rows=rows,
            token_ids=np.concatenate([np.asarray(segment.token_ids, np.intp) for segment in segments]),
            positions=np.concatenate([np.arange(first, last, dtype=np.intp) for first, last in sizes]),
            slots=np.concatenate([s.table.slots[first:last] for s, (first, last) in zip(segments, sizes, strict=True)]),
            spans=tuple(spans),
            lora=LoraRows.of([(segment.adapter, start, stop) for segment, start, stop in spans]),
        )
