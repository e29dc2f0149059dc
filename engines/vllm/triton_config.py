"""Triton package for Triton's own vLLM backend, which a full Triton container has.

Written from that backend's documentation (triton-inference-server/vllm_backend, `README.md` and `src/model.py`); it has
not been run here, where Triton comes without that backend. Its tensor contract has no `roundhouse` input, so prompts
arrive as text, adapters by `sampling_parameters.lora_name`, and KV blocks are reused inside one instance only.
"""

from __future__ import annotations

import json
from pathlib import Path

from engines.language_tensors import language_inputs, language_outputs
from engines.packaging import EngineSpec, PackagingError, TritonPackage

OURS = frozenset({"roundhouse", "embedding", "return_logprobs", "logprobs"})

# vLLM reserves this share of a GPU for itself unless told otherwise; two instances on one GPU need less each.
GPU_MEMORY_SHARE = 0.9


def vllm_package(spec: EngineSpec) -> TritonPackage:
    """Configuration, and `model.json` with the arguments of vLLM's engine; raises `PackagingError`."""
    if not (Path(spec.weights_path) / "config.json").is_file():
        raise PackagingError(f"{spec.weights_path}: no config.json, so not a Hugging Face checkpoint")
    config: dict[str, object] = {
        "name": spec.triton_model_name,
        "backend": "vllm",
        "max_batch_size": 0,
        "model_transaction_policy": {"decoupled": True},
        "input": [tensor for tensor in language_inputs() if tensor["name"] not in OURS],
        "output": [tensor for tensor in language_outputs() if tensor["name"] not in OURS],
        "instance_group": [{"kind": "KIND_MODEL", "count": 1}],
    }
    return TritonPackage(config, {"file:1/model.json": json.dumps(engine_arguments(spec), sort_keys=True).encode()})


def engine_arguments(spec: EngineSpec) -> dict[str, object]:
    """vLLM's `AsyncEngineArgs` for this model."""
    return {
        "model": spec.weights_path,
        "tensor_parallel_size": max(1, len(spec.devices)),
        "max_num_seqs": spec.slots,
        "gpu_memory_utilization": GPU_MEMORY_SHARE,
        "enable_prefix_caching": True,
    }


def estimate_vllm_bytes(spec: EngineSpec) -> int:
    """Weights as they are on disk, and the KV pool in 16 bit; raises `PackagingError`."""
    from engines.reference.triton_config import read_object

    folder = Path(spec.weights_path)
    config = read_object(folder / "config.json")
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    pool = spec.kv_pool_tokens * int(config["num_hidden_layers"]) * 2 * kv_heads * head_dim * 2
    return pool + sum(path.stat().st_size for path in folder.glob("*.safetensors"))
