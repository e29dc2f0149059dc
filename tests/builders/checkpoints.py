"""Model folders for tests: random and scripted Llama checkpoints, adapters, and a native Triton model with knobs.

Every builder gives the path it was handed, so that calls nest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from engines.checkpoint_writer import (
    Array,
    byte_level_tokenizer_json,
    checkpoint_files,
    json_bytes,
    llama_config,
    safetensors_bytes,
    tensor_shapes,
    write_folder,
)
from engines.reference.token_bytes import byte_characters

BOS, EOS = "<s>", "</s>"
SPECIAL = (BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# Marks the tokens that prompts of a scripted model are made of; no output token contains it.
PROMPT_MARK = "\u0f04"


def byte_tokenizer_files() -> dict[str, bytes]:
    """A tokenizer with one token a byte (ids 5 to 260) after the special ones (ids 0 to 4)."""
    return _tokenizer_files(byte_level_tokenizer_json(_byte_vocabulary(), [], SPECIAL))


def random_checkpoint(path: Path, seed: int = 0, *, dtype: str = "float32", **shape: Any) -> Path:
    """A small random Llama with the byte tokenizer; `shape` overrides arguments of `llama_config`."""
    sizes: dict[str, Any] = {
        "vocab_size": 261,
        "hidden_size": 32,
        "intermediate_size": 48,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "context_tokens": 512,
    }
    config = llama_config(**{**sizes, **shape}, dtype=dtype)
    tensors = random_tensors(config, seed)
    write_folder(path, checkpoint_files(config, tensors, byte_tokenizer_files(), dtype))
    return path


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, Array]:
    """Normal weights scaled so that activations keep their size; norms near 1."""
    random = np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    for name, shape in tensor_shapes(config).items():
        values = random.standard_normal(shape).astype(np.float32)
        tensors[name] = 1 + values / 10 if len(shape) == 1 else values * np.float32(2.0 / np.sqrt(shape[-1]))
    return tensors


def random_adapter(path: Path, base: Path, seed: int = 0, *, rank: int = 4, **settings: Any) -> Path:
    """A PEFT adapter over `base` that changes its answers; `settings` overrides `adapter_config.json`."""
    config = json.loads((base / "config.json").read_text())
    random = np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    targets = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    for name, (outputs, inputs) in ((n, s) for n, s in tensor_shapes(config).items() if len(s) == 2):
        if any(target in name for target in targets):
            prefix = "base_model.model." + name.removesuffix(".weight")
            tensors[prefix + ".lora_A.weight"] = random.standard_normal((rank, inputs)).astype(np.float32)
            tensors[prefix + ".lora_B.weight"] = random.standard_normal((outputs, rank)).astype(np.float32)
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name,
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [target.split(".")[1] for target in targets],
        "bias": "none",
        **settings,
    }
    files = {
        "adapter_config.json": json_bytes(adapter),
        "adapter_model.safetensors": safetensors_bytes(tensors, "float32"),
    }
    write_folder(path, files)
    return path


def scripted_checkpoint(path: Path, text: str, *, one_byte_per_token: bool = True, context_tokens: int = 2048) -> Path:
    """A real Llama checkpoint that answers exactly `text` and then ends, whatever the prompt.

    Attention and MLP add nothing, so the next token depends on the last one alone: every prompt token leads to the
    first piece of the text, each piece to the next, the last to the end token. Pieces must differ, so with
    `one_byte_per_token` no byte may occur twice (ValueError); without, the text is cut into pieces that differ.
    """
    data = text.encode()
    pieces = [data[i : i + 1] for i in range(len(data))] if one_byte_per_token else distinct_pieces(data)
    if len(set(pieces)) != len(pieces):
        raise ValueError("a byte occurs twice in the text: pass one_byte_per_token=False")
    tokenizer, first_piece = _scripted_tokenizer(pieces)
    states = len(pieces) + 1
    config = llama_config(
        vocab_size=first_piece + len(pieces),
        hidden_size=states + states % 2,
        intermediate_size=2,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=2,
        context_tokens=context_tokens,
        dtype="float32",
    )
    write_folder(path, checkpoint_files(config, _chain_tensors(config, first_piece), tokenizer, "float32"))
    return path


def distinct_pieces(data: bytes) -> list[bytes]:
    """Cut `data` into pieces of which no two are equal, as short as possible from the left (Lempel and Ziv 1978)."""
    pieces: list[bytes] = []
    start = 0
    for stop in range(1, len(data) + 1):
        if data[start:stop] not in pieces:
            pieces.append(data[start:stop])
            start = stop
    if start < len(data):
        rest = data[start:]
        pieces[-1:] = [pieces[-1] + rest]
    return pieces


def _chain_tensors(config: dict[str, Any], first_piece: int) -> dict[str, Array]:
    tensors = {name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(config).items()}
    tensors["model.norm.weight"][:] = 1.0
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    pieces = config["vocab_size"] - first_piece
    embedding[:first_piece, 0] = 1.0
    # After normalisation the one state that is on has the size sqrt(hidden): make its score 40, the others' 0.
    score = 40.0 / np.sqrt(config["hidden_size"])
    for place in range(pieces):
        embedding[first_piece + place, place + 1] = 1.0
        head[first_piece + place, place] = score
    head[config["eos_token_id"], pieces] = score
    return tensors


def _scripted_tokenizer(pieces: list[bytes]) -> tuple[dict[str, bytes], int]:
    """Prompts are encoded into marked byte tokens, which the output never uses; then come the pieces."""
    characters = {byte: character for character, byte in byte_characters().items()}
    vocabulary = {token: index for index, token in enumerate(SPECIAL)}
    for byte in range(256):
        vocabulary[characters[byte] + PROMPT_MARK] = len(vocabulary)
    first_piece = len(vocabulary)
    for piece in pieces:
        vocabulary["".join(characters[byte] for byte in piece)] = len(vocabulary)
    layout = byte_level_tokenizer_json(vocabulary, [], SPECIAL)
    isolated = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    layout["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [layout["pre_tokenizer"], isolated]}
    layout["model"]["end_of_word_suffix"] = PROMPT_MARK
    return _tokenizer_files(layout), first_piece


def _byte_vocabulary() -> dict[str, int]:
    characters = {byte: character for character, byte in byte_characters().items()}
    tokens = [*SPECIAL, *(characters[byte] for byte in range(256))]
    return {token: index for index, token in enumerate(tokens)}


def _tokenizer_files(layout: dict[str, Any]) -> dict[str, bytes]:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": CHAT_TEMPLATE,
    }
    return {"tokenizer.json": json_bytes(layout), "tokenizer_config.json": json_bytes(settings)}


def knob_model(
    path: Path,
    *,
    tokens: int = 32,
    token_interval_ms: float = 0,
    request_ms: float | None = None,
    one_at_a_time: bool = False,
    load_ms: float = 0,
    fail_load: str | None = None,
    device_bytes: int | None = None,
    die_after_tokens: int | None = None,
    error_after_tokens: int | None = None,
) -> Path:
    """A native Triton model folder with the tensor contract of language models, whose behaviour is set by knobs.

    It answers `tok0 tok1 ...`: `tokens` of them, or as many as the request's `max_tokens`. With `request_ms` the answer
    is one response after that time; with `one_at_a_time` only one request takes it at once, the others wait in the
    engine. `fail_load` fails the load with that text. The knobs are read from `knobs.json` at each load, so a test may
    change them between loads with `turn_knobs`.
    """
    knobs = {
        "tokens": tokens,
        "token_interval_ms": token_interval_ms,
        "request_ms": request_ms,
        "one_at_a_time": one_at_a_time,
        "load_ms": load_ms,
        "fail_load": fail_load,
        "die_after_tokens": die_after_tokens,
        "error_after_tokens": error_after_tokens,
    }
    source = Path(__file__).with_name("knob_triton_model.py").read_bytes()
    files = {
        "config.pbtxt": _knob_config(device_bytes).encode(),
        "1/model.py": source,
        "knobs.json": json_bytes(knobs),
        **byte_tokenizer_files(),
    }
    write_folder(path, files)
    return path


def turn_knobs(path: Path, **knobs: Any) -> None:
    """Change knobs of a folder that `knob_model` wrote; the next load sees them."""
    current = json.loads((path / "knobs.json").read_text())
    unknown = set(knobs) - set(current)
    assert not unknown, f"no such knobs: {unknown}"
    (path / "knobs.json").write_bytes(json_bytes({**current, **knobs}))


def _knob_config(device_bytes: int | None) -> str:
    from engines.language_tensors import language_inputs, language_outputs

    lines = ['backend: "python"', "max_batch_size: 0", "model_transaction_policy { decoupled: true }"]
    lines.append("instance_group [{ kind: KIND_CPU, count: 1 }]")
    for kind, tensors in (("input", language_inputs()), ("output", language_outputs())):
        for tensor in tensors:
            optional = " optional: true" if tensor.get("optional") else ""
            shape = f"data_type: {tensor['data_type']} dims: {tensor['dims']}{optional}"
            lines.append(f'{kind} {{ name: "{tensor["name"]}" {shape} }}')
    if device_bytes is not None:
        lines.append(f'parameters {{ key: "device_bytes" value: {{ string_value: "{device_bytes}" }} }}')
    return "\n".join(lines) + "\n"
