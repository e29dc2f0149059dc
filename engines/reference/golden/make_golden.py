"""Writes the golden folders: tiny random checkpoints, and the logits that `transformers` and `peft` compute from them.

Run by hand where torch, transformers and peft are installed: `python -m engines.reference.golden.make_golden`. Made
with torch 2.13.0, transformers 5.24.0 and peft 0.21.2. Each folder holds a checkpoint as `save_pretrained` writes it,
and `expected.npz` with `token_ids` `[tokens]` and `logits` `[tokens, vocab]` in float32.
"""

from __future__ import annotations

import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).parent
TOKENS = 40
VOCAB = 96

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.3,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# Folder: (transformers class, changes to the configuration, dtype on disk, shard size or None)
CASES: dict[str, tuple[str, dict[str, Any], str, str | None]] = {
    "gqa": ("Llama", {}, "float32", None),
    "tied_bias_sharded": (
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
        "bfloat16",
        "12KB",
    ),
    "llama3_rope": ("Llama", {"rope_parameters": _LLAMA3, "head_dim": 16}, "float16", None),
    "qwen2": ("Qwen2", {"num_key_value_heads": 1}, "float32", None),
}
LORA_CASE, LORA_BASE = "lora", "gqa"


def token_ids() -> np.ndarray[Any, np.dtype[np.int64]]:
    """The prompt of every case."""
    return np.random.default_rng(7).integers(2, VOCAB, TOKENS)


def build_model(case: str) -> Any:
    """The random model of a case, in the dtype on disk."""
    import torch
    import transformers

    family, changes, dtype, _ = CASES[case]
    torch.manual_seed(sorted(CASES).index(case))
    config = getattr(transformers, f"{family}Config")(**{**_SMALL, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(getattr(torch, dtype))


def load_base(case: str) -> Any:
    """The model of a case from its folder, in float32."""
    import torch
    import transformers

    family = getattr(transformers, f"{CASES[case][0]}ForCausalLM")
    return family.from_pretrained(GOLDEN / case, dtype=torch.float32).eval()


def load_adapted() -> Any:
    """The adapted base from its folders, in float32."""
    peft = import_module("peft")
    return peft.PeftModel.from_pretrained(load_base(LORA_BASE), GOLDEN / LORA_CASE).eval()


def logits_of(model: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Logits in float32, `[tokens, vocab]`."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor(token_ids())[None]).logits[0]
    return np.asarray(logits.numpy(), np.float32)


def add_adapter(model: Any) -> Any:
    """A LoRA adapter over every projection, neither half of it zero."""
    import torch

    torch.manual_seed(99)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    peft = import_module("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return adapted.eval()


def write_case(case: str) -> None:
    """Write one base checkpoint and its logits."""
    folder = GOLDEN / case
    shutil.rmtree(folder, ignore_errors=True)
    model = build_model(case)
    shard = CASES[case][3]
    model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
    np.savez_compressed(folder / "expected.npz", token_ids=token_ids(), logits=logits_of(load_base(case)))


def write_lora_case() -> None:
    """Write the adapter and the logits of the adapted base."""
    folder = GOLDEN / LORA_CASE
    shutil.rmtree(folder, ignore_errors=True)
    add_adapter(build_model(LORA_BASE)).save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    np.savez_compressed(folder / "expected.npz", token_ids=token_ids(), logits=logits_of(load_adapted()))


def main() -> None:
    """Write every folder anew."""
    for case in CASES:
        write_case(case)
        print(case, file=sys.stderr)
    write_lora_case()


if __name__ == "__main__":
    main()
