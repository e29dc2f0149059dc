"""Writes Hugging Face checkpoint folders and byte-level tokenizers: for the demo catalogue and for tests.

A folder appears under its final name only when it is whole. The same input gives the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

_DTYPES: dict[str, tuple[str, str]] = {"float32": ("F32", "<f4"), "float16": ("F16", "<f2")}


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write `files` (names relative to `folder`) beside the target, then rename; replaces what was there."""
    staged = folder.with_name(folder.name + ".partial")
    shutil.rmtree(staged, ignore_errors=True)
    for name, data in files.items():
        path = staged / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    if folder.exists():
        shutil.rmtree(folder)
    staged.rename(folder)


def safetensors_bytes(tensors: Mapping[str, Array], dtype: str = "float16") -> bytes:
    """A safetensors file with `tensors` in `dtype` (`float32`, `float16` or `bfloat16`), names in order."""
    entries: dict[str, Any] = {}
    parts: list[bytes] = []
    offset = 0
    for name in sorted(tensors):
        code, data = _encode(tensors[name], dtype)
        entries[name] = {
            "dtype": code,
            "shape": list(tensors[name].shape),
            "data_offsets": [offset, offset + len(data)],
        }
        parts.append(data)
        offset += len(data)
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return b"".join([len(header).to_bytes(8, "little"), header, *parts])


def _encode(tensor: Array, dtype: str) -> tuple[str, bytes]:
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(tensor, "<f4").view("<u4")
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))  # to nearest, ties to even
        return "BF16", (rounded >> np.uint32(16)).astype("<u2").tobytes()
    code, storage = _DTYPES[dtype]
    return code, tensor.astype(storage).tobytes()


def llama_config(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int | None = None,
    context_tokens: int = 2048,
    tied_head: bool = False,
    bos_token_id: int = 0,
    eos_token_id: int = 1,
    dtype: str = "float16",
) -> dict[str, Any]:
    """The `config.json` of a Llama model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden_size // heads,
        "hidden_act": "silu",
        "max_position_embeddings": context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied_head,
        "attention_bias": False,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "torch_dtype": dtype,
    }


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model that `config` describes."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        shapes[layer + "self_attn.q_proj.weight"] = (query, hidden)
        shapes[layer + "self_attn.k_proj.weight"] = (kv, hidden)
        shapes[layer + "self_attn.v_proj.weight"] = (kv, hidden)
        shapes[layer + "self_attn.o_proj.weight"] = (hidden, query)
        shapes[layer + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[layer + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[layer + "mlp.down_proj.weight"] = (hidden, inner)
    return shapes


def checkpoint_files(
    config: Mapping[str, Any], tensors: Mapping[str, Array], tokenizer: Mapping[str, bytes], dtype: str = "float16"
) -> dict[str, bytes]:
    """The files of a checkpoint folder; `tokenizer` holds the tokenizer's own files."""
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    return {
        "config.json": json_bytes(config),
        "generation_config.json": json_bytes(generation),
        "model.safetensors": safetensors_bytes(tensors, dtype),
        **tokenizer,
    }


def json_bytes(value: object) -> bytes:
    """Indented JSON with a final newline."""
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def byte_level_tokenizer_json(
    vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]], special: Sequence[str]
) -> dict[str, Any]:
    """A byte-level BPE `tokenizer.json`; `special` tokens are in the vocabulary too."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocabulary[token], "content": token, **flags} for token in special],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(vocabulary),
            "merges": [list(merge) for merge in merges],
        },
    }
