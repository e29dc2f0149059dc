"""A few small model folders and a right declaration of them, for tests to break."""

import json
from pathlib import Path

CONFIG = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "max_position_embeddings": 64,
}

GOOD = """\
version: 1
tenants:
  - name: acme
    weight: 2
    class: interactive
    limits: {requests_per_minute: 600, tokens_per_minute: 200000}
    budget: {amount: 100.50, currency: EUR, period: month}
    models: ["*"]
  - name: globex
models:
  - name: chat
    source: {path: models/chat}
    engine: reference
    slots: 2
    memory: {device: auto, kv_pool_tokens: 100}
    slo: {time_to_first_token_ms: 500}
    residency: {pinned: true, min_replicas: 1}
    access: {tenants: [acme]}
    price: {id: chat-v1, input: 0.15, cached_input: "0.075", output: 0.60}
  - name: tagger
    source: {path: models/tagger.onnx}
    engine: onnx
    memory: {device: 64MiB}
adapters:
  - name: chat-acme
    base: chat
    source: {path: adapters/chat-acme}
    tenant: acme
"""


def write_models(root: Path) -> Path:
    """Every file that `GOOD` names, below `root`; returns `root`."""
    checkpoint(root / "models" / "chat")
    (root / "models" / "tagger.onnx").write_bytes(b"o" * 1_000)
    lora(root / "adapters" / "chat-acme")
    return root


def lora(folder: Path, *, rank: int = 2, inputs: int = 8, layer: int = 0, **settings: object) -> Path:
    """An adapter on the query projection of one layer of `checkpoint`: A is [2, 8], B is [8, 2]. Zeros."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj"], **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
    shapes = {f"{prefix}A.weight": (rank, inputs), f"{prefix}B.weight": (8, rank)}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))
    return folder


def checkpoint(folder: Path, *, fill: bytes = b"\0") -> Path:
    """A checkpoint with one float16 tensor of 4 × 8 = 32 elements."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F16", "shape": [4, 8], "data_offsets": [0, 64]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + fill * 64)
    return folder
