"""The shape of a Llama-family decoder, read from a Hugging Face `config.json`.

Anything this engine would compute wrongly (another activation, a sliding window, an unknown rotary scaling) is refused
here by name, never approximated. Source of the field names: `transformers` `LlamaConfig`, `Qwen2Config`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUPPORTED_FAMILIES = ("llama", "mistral", "qwen2")


class CheckpointError(Exception):
    """A checkpoint folder that this engine cannot serve; the text names the file and the field."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Rotary frequencies stretched for long context as in Llama 3.1 (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of one model; `context_tokens` is the longest prompt plus completion it was made for."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | float | None
    context_tokens: int
    tied_head: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    @property
    def query_size(self) -> int:
        """Width of the query projection."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key projection, and of the value projection."""
        return self.kv_heads * self.head_dim


def load_model_config(folder: Path) -> ModelConfig:
    """Read `config.json` and, for the end tokens, `generation_config.json`; raises `CheckpointError`."""
    raw = _read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    return parse_model_config(raw, _read_json(generation) if generation.exists() else {})


def parse_model_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Turn the fields of `config.json` into a `ModelConfig`; raises `CheckpointError` naming the field at fault."""
    _refuse_what_would_be_wrong(raw)
    heads = _positive(raw, "num_attention_heads")
    hidden = _positive(raw, "hidden_size")
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = int(raw.get("head_dim") or hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim {head_dim} is odd, so it has no rotary halves")
    theta, scaling = _rotary(raw)
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    return ModelConfig(
        vocab_size=_positive(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(raw, "intermediate_size"),
        layers=_positive(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=theta,
        rope_scaling=scaling,
        context_tokens=int(raw.get("max_position_embeddings", 2048)),
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        bos_token_id=raw.get("bos_token_id"),
    )


def _refuse_what_would_be_wrong(raw: Mapping[str, Any]) -> None:
    family = raw.get("model_type", "llama")
    if family not in SUPPORTED_FAMILIES:
        raise CheckpointError(f"config.json: model_type {family!r} is not one of {', '.join(SUPPORTED_FAMILIES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"config.json: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    window = raw.get("sliding_window")
    windowed = raw.get("use_sliding_window", family == "mistral") and window is not None
    if windowed and int(window or 0) < int(raw.get("max_position_embeddings", 2048)):
        raise CheckpointError(f"config.json: sliding_window {window} is shorter than the context; not supported")


def _rotary(raw: Mapping[str, Any]) -> tuple[float, Llama3Scaling | float | None]:
    """Base frequency and scaling; `transformers` 5 nests both under `rope_parameters`."""
    nested = raw.get("rope_parameters") or {}
    theta = float(nested.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    scaling = nested or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, float(scaling["factor"])
    if kind == "llama3":
        return theta, Llama3Scaling(
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_positions=int(scaling["original_max_position_embeddings"]),
        )
    raise CheckpointError(f"config.json: rope_type {kind!r} is not supported, only default, linear and llama3")


def _positive(raw: Mapping[str, Any], field: str) -> int:
    value = raw.get(field)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {field} must be a positive integer, not {value!r}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.name}: no such file in {path.parent}") from None
    except ValueError as error:
        raise CheckpointError(f"{path.name}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name}: a JSON object is expected")
    return value
