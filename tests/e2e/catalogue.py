"""The catalogue of the end-to-end mesh: few small models, each with a purpose, all of one size on the device.

Every instance takes 20 MiB and a node has 100 MiB: five stand on a node, ten in the mesh, and the catalogue has more.

| model | for |
| --- | --- |
| `tiny-1` to `tiny-6` | random language models of the reference engine |
| `words` | answers exactly `ANSWER`, one byte a token (case B31) |
| `story` | a language model with knobs: 32 tokens, 20 ms apart |
| `slow-load` | the same, but its load takes 1.5 s |
| `broken` | a load that fails with its own words (case B18) |
| `dies` | ends its process after 3 tokens (case B29) |
| `classifier` | ONNX tensors passed through |
| `acme-only` | invisible to other tenants |
| `tiny-1-lora` | adapter of `acme` over `tiny-1` |
"""

from pathlib import Path
from typing import Any

import yaml

from tests.builders.checkpoints import knob_model, random_adapter, random_checkpoint, scripted_checkpoint

MODEL_BYTES = 20 * 2**20
NODE_BYTES = 100 * 2**20
ANSWER = "ď🌍你"  # case B31: two, four and three bytes, no byte twice
INTENT_MODEL = Path(__file__).resolve().parents[2] / "engines" / "onnx" / "intent" / "intent.onnx"
GENEROUS = {"requests_per_minute": 100_000, "tokens_per_minute": 100_000_000, "concurrent_requests": 256}
TIGHT = {"requests_per_minute": 10, "tokens_per_minute": 100_000, "concurrent_requests": 2}
FRUGAL_MICRO = 400  # millionths of a dollar
FRUGAL = {"amount": "0.0004", "currency": "USD"}
SHARED_PROMPT = ("every engine waits in its stall until the turntable is free. " * 6)[:325]  # 20 blocks of 16, and 5
PRICE = {"id": "test-1", "input": "1", "cached_input": "0.5", "output": "2"}


def write_catalogue(root: Path) -> Path:
    """Write models and `catalogue.yaml` under `root`; returns the file."""
    models = [_language(f"tiny-{number}", random_checkpoint(root / f"tiny-{number}", number)) for number in range(1, 7)]
    models.append(_language("acme-only", random_checkpoint(root / "acme-only", 99), access={"tenants": ["acme"]}))
    models.append(_language("words", scripted_checkpoint(root / "words", ANSWER)))
    models.append(_knobs("story", knob_model(root / "story", tokens=32, token_interval_ms=20)))
    models.append(_knobs("slow-load", knob_model(root / "slow-load", load_ms=1500)))
    models.append(_knobs("broken", knob_model(root / "broken", fail_load="the weights are cut off")))
    models.append(_knobs("dies", knob_model(root / "dies", token_interval_ms=5, die_after_tokens=3)))
    models.append(_model("classifier", INTENT_MODEL, engine="onnx", interface="tensors"))
    adapter = random_adapter(root / "tiny-1-lora", root / "tiny-1")
    declaration = {
        "version": 1,
        "tenants": [
            {"name": "acme", "limits": GENEROUS},
            {"name": "globex", "limits": GENEROUS},
            {"name": "tight", "limits": TIGHT},
            {"name": "frugal", "limits": GENEROUS, "budget": FRUGAL},
            *({"name": name, "limits": GENEROUS, "sharing_group": "duo"} for name in ("east", "west", "south")),
        ],
        # `south` would like to be in it and is not accepted; `acme` is in none.
        "sharing_groups": [{"name": "duo", "tenants": ["east", "west"], "prompts": [SHARED_PROMPT]}],
        "models": models,
        "adapters": [{"name": "tiny-1-lora", "base": "tiny-1", "source": {"path": str(adapter)}, "tenant": "acme"}],
    }
    path = root / "catalogue.yaml"
    path.write_text(yaml.safe_dump(declaration, sort_keys=False))
    return path


def _language(name: str, folder: Path, **more: Any) -> dict[str, Any]:
    return _model(name, folder, engine="reference", interface="llm", kv_pool_tokens=1024, **more)


def _knobs(name: str, folder: Path) -> dict[str, Any]:
    return _model(name, folder, engine="triton", interface="llm", kv_pool_tokens=4096, context_tokens=2048)


def _model(name: str, path: Path, *, kv_pool_tokens: int | None = None, **more: Any) -> dict[str, Any]:
    memory: dict[str, Any] = {"device": MODEL_BYTES}
    if kv_pool_tokens is not None:
        memory["kv_pool_tokens"] = kv_pool_tokens
    return {"name": name, "source": {"path": str(path)}, "memory": memory, "price": PRICE, **more}
