"""Triton package for Triton's own vLLM backend, which a full Triton container has.

Written from that backend's sources (triton-inference-server/vllm_backend: `src/model.py`, `src/utils/`). It has not
been run here, where Triton comes without that backend; the arguments were, on vLLM's CPU build
(`tests/integration/vllm/test_backend_arguments.py`). That backend reads prompts as text and adapters from
`sampling_parameters.lora_name`; it gives every key of model.json to `AsyncEngineArgs` and every key of
`sampling_parameters` to `SamplingParams`, so that the connector to the node's kvstore and the salt of a request's
tenant (`extra_args`) pass through it. Decision: docs/decisions/0146-vllm-behind-triton.md.
"""

from __future__ import annotations

import json
from pathlib import Path

from engines.language_tensors import language_inputs, language_outputs
from engines.packaging import EngineSpec, PackagingError, TritonPackage
from engines.placement import hold_process

WORKSPACE_BYTES = 2**30  # a GPU: CUDA context, activations, captured graphs. A guess; the first load is measured.

# What that backend never gives. Its inputs are declared with our `roundhouse`, which it does not read: Triton refuses
# calls with an input that a model does not declare, and gateways always send it.
OURS = frozenset({"roundhouse", "embedding", "token_ids"})

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
        "input": language_inputs(),
        "output": [tensor for tensor in language_outputs() if tensor["name"] not in OURS],
        "instance_group": [{"kind": "KIND_MODEL", "count": 1}],
    }
    files = {"file:1/model.json": json.dumps(engine_arguments(spec), sort_keys=True).encode()}
    hold_process(config, files, spec.devices, spec.alone_for)
    return TritonPackage(config, files)


def engine_arguments(spec: EngineSpec) -> dict[str, object]:
    """vLLM's `AsyncEngineArgs` for this model.

    vLLM's own prefix cache stays off: that backend has no way to salt it, so tenants would share it (invariant 11)."""
    arguments: dict[str, object] = {
        "model": spec.weights_path,
        "tensor_parallel_size": len(spec.devices) or spec.tensor_parallel,
        "max_num_seqs": spec.slots,
        "gpu_memory_utilization": _memory_share(spec),
        "enable_prefix_caching": False,
    }
    if spec.kvstore_address and arguments["tensor_parallel_size"] == 1:  # the connector is for one worker
        arguments["kv_transfer_config"] = {
            "kv_connector": "RoundhouseConnector",
            "kv_connector_module_path": "engines.vllm.kv_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kvstore_address": spec.kvstore_address, "model_digest": spec.model_digest},
        }
    return arguments


def _memory_share(spec: EngineSpec) -> float:
    """The part of each GPU that this model was given; vLLM fills it with weights, workspace and KV blocks."""
    smallest = min((device.capacity for device in spec.devices), default=0)
    if not smallest or not spec.share:
        return GPU_MEMORY_SHARE
    return min(GPU_MEMORY_SHARE, round(spec.share / smallest, 4))


def estimate_vllm_bytes(spec: EngineSpec) -> int:
    """Weights as they are on disk, the KV pool in 16 bit, and each GPU's workspace; raises `PackagingError`."""
    from engines.reference.triton_config import read_object

    folder = Path(spec.weights_path)
    config = read_object(folder / "config.json")
    heads = int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    pool = spec.kv_pool_tokens * int(config["num_hidden_layers"]) * 2 * kv_heads * head_dim * 2
    workspace = max(1, spec.tensor_parallel) * WORKSPACE_BYTES
    return workspace + pool + sum(path.stat().st_size for path in folder.glob("*.safetensors"))
