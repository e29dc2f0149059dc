"""The weights of one decoder, checked against its configuration and laid out for tiled products.

Projections that read the same input are joined (q, k and v; gate and up), so that a layer is four products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.reference.model_config import CheckpointError, ModelConfig
from engines.reference.tiled_matmul import TiledMatrix

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Biases are None where the checkpoint has none."""

    input_norm: Array
    qkv: TiledMatrix
    qkv_bias: Array | None
    out: TiledMatrix
    out_bias: Array | None
    post_norm: Array
    gate_up: TiledMatrix
    gate_up_bias: Array | None
    down: TiledMatrix
    down_bias: Array | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole decoder; `embedding` is `[vocab, hidden]`."""

    embedding: Array
    layers: tuple[LayerWeights, ...]
    final_norm: Array
    head: TiledMatrix


def arrange_weights(config: ModelConfig, tensors: Mapping[str, Array]) -> DecoderWeights:
    """Check names and shapes and lay the tensors out; raises `CheckpointError` naming the tensor at fault."""
    pick = _Picker(tensors)
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = pick("model.embed_tokens.weight", vocab, hidden)
    # A checkpoint saved with a tied head often leaves it out, whatever its config says.
    tied = config.tied_head or "lm_head.weight" not in tensors
    head = embedding if tied else pick("lm_head.weight", vocab, hidden)
    return DecoderWeights(
        embedding=np.ascontiguousarray(embedding),
        layers=tuple(_arrange_layer(config, pick, f"model.layers.{index}.") for index in range(config.layers)),
        final_norm=pick("model.norm.weight", hidden),
        head=TiledMatrix(head),
    )


def _arrange_layer(config: ModelConfig, pick: _Picker, prefix: str) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    qkv_sizes = (("q_proj", config.query_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size))
    gate_up_sizes = (("gate_proj", inner), ("up_proj", inner))
    return LayerWeights(
        input_norm=pick(prefix + "input_layernorm.weight", hidden),
        qkv=TiledMatrix(np.concatenate([pick(f"{attention}{n}.weight", size, hidden) for n, size in qkv_sizes])),
        qkv_bias=pick.joined_bias(attention, qkv_sizes),
        out=TiledMatrix(pick(attention + "o_proj.weight", hidden, config.query_size)),
        out_bias=pick.joined_bias(attention, (("o_proj", hidden),)),
        post_norm=pick(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=TiledMatrix(np.concatenate([pick(f"{mlp}{n}.weight", size, hidden) for n, size in gate_up_sizes])),
        gate_up_bias=pick.joined_bias(mlp, gate_up_sizes),
        down=TiledMatrix(pick(mlp + "down_proj.weight", hidden, inner)),
        down_bias=pick.joined_bias(mlp, (("down_proj", hidden),)),
    )


class _Picker:
    """Takes tensors by name and insists on their shape."""

    def __init__(self, tensors: Mapping[str, Array]) -> None:
        self._tensors = tensors

    def __call__(self, name: str, *shape: int) -> Array:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"tensor {name} is missing")
        if tensor.shape != shape:
            raise CheckpointError(f"tensor {name} is {list(tensor.shape)}, config.json asks for {list(shape)}")
        return tensor

    def joined_bias(self, prefix: str, sizes: tuple[tuple[str, int], ...]) -> Array | None:
        """The biases of joined projections, zeros for those that have none; None when none has."""
        names = [f"{prefix}{name}.bias" for name, _ in sizes]
        if not any(name in self._tensors for name in names):
            return None
        parts = [
            self(name, size) if name in self._tensors else np.zeros(size, np.float32)
            for name, (_, size) in zip(names, sizes, strict=True)
        ]
        return np.concatenate(parts)
