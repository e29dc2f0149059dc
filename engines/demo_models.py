"""Writes the demo catalogue: hundreds of small models of 40 tenants, from a seed, in seconds and under 600 MB.

Four random Llama bases, 200 full fine-tunes and 200 LoRA adapters over them, and one ONNX classifier. They know
nothing; they answer in word salad, each its own. Deterministic: the same seed gives the same bytes. Resumable: a folder
appears under its name only when it is whole, and whole folders are kept; the catalogue is written last.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engines.checkpoint_writer import (
    Array,
    checkpoint_files,
    json_bytes,
    llama_config,
    safetensors_bytes,
    tensor_shapes,
    write_folder,
)
from engines.demo_catalogue import DemoAdapter, DemoModel, catalogue_yaml, tenant_names
from engines.demo_tokenizer import VOCAB_SIZE, DemoTokenizer, train_demo_tokenizer

FORMAT = 1  # raise it when the same seed gives other bytes, so that old folders are written anew
FINE_TUNES_PER_TENANT = 5
ADAPTERS_PER_TENANT = 5
ROLES = ("support", "sales", "legal", "code", "summary")
CLASSIFIER = "classifier-intent"
INTENT_MODEL = Path(__file__).parent / "onnx/intent/intent.onnx"

# Rows of tokens that are no whole word are kept small, so that greedy answers are words. The end token is a little
# below the words: a greedy answer meets it about once in 2,000 tokens.
OTHER_TOKEN_GAIN = 0.05
END_TOKEN_GAIN = 0.9

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Gains:
    """How much larger than unit gain the random matrices are; by trial: with less, greedy answers repeat themselves."""

    attention: float
    mlp: float
    scores: float


# A tied head prefers the token it has just read, so the layers must drown it out.
_TIED = Gains(attention=6.0, mlp=10.0, scores=4.0)
_UNTIED = Gains(attention=3.0, mlp=3.0, scores=3.0)


@dataclass(frozen=True, slots=True)
class DemoBase:
    """One base model, and its share of the fine-tunes."""

    name: str
    shape: dict[str, Any]
    gains: Gains
    fine_tunes_per_100: int
    slots: int = 4


BASES = (
    DemoBase(
        "base-xs",
        {"hidden_size": 96, "intermediate_size": 256, "layers": 4, "heads": 6, "kv_heads": 6},
        _UNTIED,
        fine_tunes_per_100=45,
    ),
    DemoBase(
        "base-s",
        {"hidden_size": 128, "intermediate_size": 320, "layers": 3, "heads": 4, "kv_heads": 2, "tied_head": True},
        _TIED,
        fine_tunes_per_100=40,
    ),
    DemoBase(
        "base-m",
        {"hidden_size": 192, "intermediate_size": 512, "layers": 4, "heads": 6, "kv_heads": 2, "tied_head": True},
        _TIED,
        fine_tunes_per_100=12,
    ),
    DemoBase(
        "base-l",
        {"hidden_size": 256, "intermediate_size": 640, "layers": 6, "heads": 8, "kv_heads": 4},
        _UNTIED,
        fine_tunes_per_100=3,
    ),
)


@dataclass(frozen=True, slots=True)
class DemoCatalogue:
    """What was written. `path` is the catalogue file; models and adapters lie beside it."""

    path: Path
    tenants: tuple[str, ...]
    models: tuple[DemoModel, ...]
    adapters: tuple[DemoAdapter, ...]


def write_demo_models(root: Path, seed: int = 0, progress: Progress | None = None) -> DemoCatalogue:
    """Write everything under `root`; `progress(done, total, name)` is told of each folder. Idempotent."""
    _discard_other_formats(root, seed)
    catalogue = plan_demo_catalogue(root)
    folders = list(_folders(catalogue, seed))
    for done, (name, folder, files) in enumerate(folders, start=1):
        if not folder.exists():
            write_folder(folder, files())
        if progress is not None:
            progress(done, len(folders), name)
    staged = catalogue.path.with_suffix(".partial")
    staged.write_text(catalogue_yaml(catalogue.tenants, catalogue.models, catalogue.adapters), encoding="utf-8")
    staged.replace(catalogue.path)
    return catalogue


def plan_demo_catalogue(root: Path) -> DemoCatalogue:
    """What `write_demo_models` writes; touches no file."""
    tenants = tenant_names()
    models = [DemoModel(base.name, base.name, base.slots) for base in BASES]
    models.append(DemoModel(CLASSIFIER, None, slots=4))
    adapters: list[DemoAdapter] = []
    for place, tenant in enumerate(tenants):
        for number in range(1, FINE_TUNES_PER_TENANT + 1):
            role = ROLES[(place + number) % len(ROLES)]
            base = _base_for(place * FINE_TUNES_PER_TENANT + number - 1)
            models.append(DemoModel(f"{tenant}-{role}-{number}", base.name, base.slots, tenant))
        for number in range(1, ADAPTERS_PER_TENANT + 1):
            base = BASES[(place + number) % len(BASES)]
            adapters.append(DemoAdapter(f"{tenant}-lora-{number}", base.name, tenant))
    return DemoCatalogue(root / "catalogue.yaml", tenants, tuple(models), tuple(adapters))


def _base_for(index: int) -> DemoBase:
    """Bases in their shares, spread evenly: 37 has no factor in common with 100."""
    place = index * 37 % 100
    for base in BASES:
        if place < base.fine_tunes_per_100:
            return base
        place -= base.fine_tunes_per_100
    raise AssertionError("shares add up to 100")


def _folders(catalogue: DemoCatalogue, seed: int) -> Iterator[tuple[str, Path, Callable[[], dict[str, bytes]]]]:
    """Name, folder and content of each thing to write; the content is made only when it is asked for."""
    workshop = _Workshop(seed)
    root = catalogue.path.parent
    for model in catalogue.models:
        folder = root / "models" / model.name
        yield model.name, folder, lambda model=model: workshop.model_files(model)  # type: ignore[misc]
    for adapter in catalogue.adapters:
        folder = root / "adapters" / adapter.name
        yield adapter.name, folder, lambda adapter=adapter: workshop.adapter_files(adapter)  # type: ignore[misc]


class _Workshop:
    """Makes the content of folders; keeps the tokenizer and the bases, which many folders are made from."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._tokenizer: DemoTokenizer | None = None
        self._bases: dict[str, tuple[dict[str, Any], dict[str, Array]]] = {}

    def model_files(self, model: DemoModel) -> dict[str, bytes]:
        if model.base is None:
            return {"model.onnx": INTENT_MODEL.read_bytes()}
        config, tensors = self._base(model.base)
        if model.name != model.base:
            tensors = self._fine_tuned(model.name, tensors)
        return checkpoint_files(config, tensors, self._shared_tokenizer().files)

    def adapter_files(self, adapter: DemoAdapter) -> dict[str, bytes]:
        """A PEFT adapter whose change is about as large as what it changes."""
        config, _ = self._base(adapter.base)
        random = self._chance(adapter.name)
        rank = int(random.choice((4, 8)))
        targets = ("q_proj", "v_proj", "down_proj")
        tensors: dict[str, Array] = {}
        for name, shape in tensor_shapes(config).items():
            if name.split(".")[-2] not in targets:
                continue
            outputs, inputs = shape
            prefix = "base_model.model." + name.removesuffix(".weight")
            gain = self._gain(adapter.base, name)
            tensors[prefix + ".lora_A.weight"] = _normal(random, (rank, inputs), inputs**-0.5)
            tensors[prefix + ".lora_B.weight"] = _normal(random, (outputs, rank), gain * rank**-0.5)
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": adapter.base,
            "r": rank,
            "lora_alpha": rank,
            "lora_dropout": 0.0,
            "target_modules": list(targets),
            "bias": "none",
        }
        return {
            "adapter_config.json": json_bytes(settings),
            "adapter_model.safetensors": safetensors_bytes(tensors, "float16"),
        }

    def _fine_tuned(self, name: str, tensors: dict[str, Array]) -> dict[str, Array]:
        """The base with other down projections: half their size in noise."""
        random = self._chance(name)
        changed = dict(tensors)
        for key in sorted(tensors):
            if "down_proj" in key:
                tensor = tensors[key]
                changed[key] = tensor + _normal(random, tensor.shape, 0.5 * float(tensor.std()))
        return changed

    def _base(self, name: str) -> tuple[dict[str, Any], dict[str, Array]]:
        if name not in self._bases:
            base = next(base for base in BASES if base.name == name)
            tokenizer = self._shared_tokenizer()
            ends = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
            config = llama_config(**{"vocab_size": VOCAB_SIZE, **base.shape, **ends})
            self._bases[name] = config, self._base_tensors(base, config, tokenizer)
        return self._bases[name]

    def _base_tensors(self, base: DemoBase, config: dict[str, Any], tokenizer: DemoTokenizer) -> dict[str, Array]:
        random = self._chance(base.name)
        tensors: dict[str, Array] = {}
        for name, shape in tensor_shapes(config).items():
            if len(shape) == 1:
                tensors[name] = np.ones(shape, np.float32)
            else:
                tensors[name] = _normal(random, shape, self._gain(base.name, name) * shape[1] ** -0.5)
        tensors["model.embed_tokens.weight"] *= np.float32(config["hidden_size"] ** 0.5)
        head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
        gains = np.full((VOCAB_SIZE, 1), OTHER_TOKEN_GAIN, np.float32)
        gains[list(tokenizer.word_ids)] = 1.0
        gains[tokenizer.eos_id] = END_TOKEN_GAIN
        tensors[head] *= gains
        return tensors

    def _gain(self, base_name: str, tensor: str) -> float:
        gains = next(base.gains for base in BASES if base.name == base_name)
        named = {"q_proj": gains.scores, "k_proj": gains.scores, "o_proj": gains.attention, "down_proj": gains.mlp}
        return named.get(tensor.split(".")[-2], 1.0)

    def _shared_tokenizer(self) -> DemoTokenizer:
        if self._tokenizer is None:
            self._tokenizer = train_demo_tokenizer()
        return self._tokenizer

    def _chance(self, name: str) -> np.random.Generator:
        """Each folder has its own chance, so that it does not depend on which were written before."""
        return np.random.default_rng((self._seed, zlib.crc32(name.encode())))


def _normal(random: np.random.Generator, shape: tuple[int, ...], deviation: float) -> Array:
    return random.standard_normal(shape, dtype=np.float32) * np.float32(deviation)


def _discard_other_formats(root: Path, seed: int) -> None:
    """Remove what was written from another seed or by another version of this code."""
    stamp = root / "seed.json"
    current = json_bytes({"format": FORMAT, "seed": seed})
    if not stamp.exists() or stamp.read_bytes() != current:
        for name in ("models", "adapters"):
            shutil.rmtree(root / name, ignore_errors=True)
        root.mkdir(parents=True, exist_ok=True)
        stamp.write_bytes(current)
