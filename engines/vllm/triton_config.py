"""Triton package for Triton's own vLLM backend, which a full Triton container has.

Written from that backend's sources (triton-inference-server/vllm_backend: `src/model.py`, `src/utils/`), which a Triton
wheel does not bring; it was run with them and vLLM's CPU build (`tests/integration/vllm/test_adapters_on_triton.py`),
never on a GPU. That backend reads prompts as text; it gives every key of model.json to `AsyncEngineArgs` and every key
of `sampling_parameters` to `SamplingParams`, so that the connector to the node's kvstore and the salt of a request's
tenant (`extra_args`) pass through it. Adapters it knows by the names of multi_lora.json, read once when the model
loads; a request names one as `sampling_parameters.lora_name`, and vLLM opens its path when it first runs it. So names
and paths are given out in advance (`AdapterBerths`). Decisions: docs/decisions/0146-vllm-behind-triton.md,
0150-adapters-over-vllm.md.
"""

from __future__ import annotations

import json
from pathlib import Path

from engines.language_tensors import language_inputs, language_outputs
from engines.packaging import AdapterBerths, EngineSpec, PackagingError, TritonPackage
from engines.placement import hold_process
from roundhouse.catalogue.base_shape import adapter_slot_bytes, base_shape
from roundhouse.catalogue.lora_format import vllm_rank

WORKSPACE_BYTES = 2**30  # a GPU: CUDA context, activations, captured graphs. A guess; the first load is measured.

# What that backend never gives. Its inputs are declared with our `roundhouse`, which it does not read: Triton refuses
# calls with an input that a model does not declare, and gateways always send it.
OURS = frozenset({"roundhouse", "embedding", "token_ids"})

# vLLM reserves this share of a GPU for itself unless told otherwise; two instances on one GPU need less each.
GPU_MEMORY_SHARE = 0.9


# vLLM keeps so many adapters in its process's memory for each one in a device slot, least recently used leaves; the
# others wait in the node's host memory. A guess.
CPU_COPIES = 4


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
    # An engine core that ends leaves its model READY and every request failing: with this the backend looks at it
    # before each request and unloads the model, which its loader sees and loads again.
    config["parameters"] = {"ENABLE_VLLM_HEALTH_CHECK": {"string_value": "true"}}
    files = {"file:1/model.json": json.dumps(engine_arguments(spec), sort_keys=True).encode()}
    if spec.berths is not None and spec.adapter_slots:
        files["file:1/multi_lora.json"] = json.dumps(_adapter_names(spec.berths)).encode()
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
    if spec.berths is not None and spec.adapter_slots:
        arguments |= {
            "enable_lora": True,
            "max_loras": spec.adapter_slots,
            "max_lora_rank": vllm_rank(spec.adapter_rank_max),
            "max_cpu_loras": CPU_COPIES * spec.adapter_slots,
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


def _adapter_names(berths: AdapterBerths) -> dict[str, str]:
    """multi_lora.json. A name's place in it is the number by which vLLM remembers the adapter."""
    return {f"{berths.name}-{number}": f"{berths.folder}/{number}" for number in range(berths.count)}


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
    workspace += adapter_slot_bytes(base_shape(config), spec.adapter_slots, vllm_rank(spec.adapter_rank_max))
    return workspace + pool + sum(path.stat().st_size for path in folder.glob("*.safetensors"))
