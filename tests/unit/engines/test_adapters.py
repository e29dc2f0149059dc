"""LoRA adapters: good ones change their own request, bad ones fail it with a reason, the last used stay loaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.checkpoint_writer import safetensors_bytes
from engines.reference.checkpoint import read_safetensors
from engines.reference.model_config import load_model_config
from engines.reference.peft_format import AdapterCache, AdapterError, AdapterMismatch, load_adapter
from roundhouse.catalogue.digests import version_digest
from tests.builders.checkpoints import random_adapter, random_checkpoint
from tests.unit.engines.engine_driver import make_request, open_model, run_one, run_requests


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small base."""
    return random_checkpoint(tmp_path_factory.mktemp("adapters") / "base", 1)


def test_requests_with_and_without_adapters_run_side_by_side(base: Path, tmp_path: Path) -> None:
    """Two adapters and the base give three different answers in one batch, each as it is alone."""
    model = open_model(base)
    details: list[dict[str, Any] | None] = [None]
    for seed in (1, 2):
        path = random_adapter(tmp_path / f"a{seed}", base, seed)
        details.append({"adapter": {"path": str(path), "digest": str(seed)}})
    together = run_requests(model, [make_request(model, "same prompt", details=d) for d in details])
    assert len({tuple(outcome.token_ids) for outcome in together}) == 3
    alone = [run_one(model, "same prompt", details=d) for d in details]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"r": 0}, "r must be in"),
        ({"r": 65}, "r must be in"),
        ({"r": 8}, "made for another base or rank"),
        ({"r": "4"}, "r must be in"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"target_modules": ["lm_head"]}, "target_modules"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": ["q_proj"]}, "not of a target module"),
        ({"bias": "all"}, "bias"),
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type"),
    ],
)
def test_settings_that_cannot_be_computed_are_refused(
    base: Path, tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    """Each by its name, before anything runs."""
    path = random_adapter(tmp_path / "bad", base, **settings)
    with pytest.raises(AdapterError, match=reason):
        load_adapter(path, load_model_config(base), rank_max=64)


def test_an_adapter_of_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    """More layers than this base, or other widths."""
    config = load_model_config(base)
    deeper = random_checkpoint(tmp_path / "deeper", layers=3)
    with pytest.raises(AdapterError, match="layer 2, this base has 2 layers"):
        load_adapter(random_adapter(tmp_path / "a", deeper), config, rank_max=64)
    wider = random_checkpoint(tmp_path / "wider", hidden_size=64)
    with pytest.raises(AdapterError, match="made for another base or rank"):
        load_adapter(random_adapter(tmp_path / "b", wider), config, rank_max=64)


def test_broken_files_are_refused(base: Path, tmp_path: Path) -> None:
    """No folder, no JSON, cut off tensors, a missing half, values that are not finite."""
    config = load_model_config(base)
    with pytest.raises(AdapterError, match="is not in gone"):
        load_adapter(tmp_path / "gone", config, rank_max=64)
    path = random_adapter(tmp_path / "a", base)
    weights = path / "adapter_model.safetensors"
    tensors = read_safetensors(weights)
    name = sorted(tensors)[0]
    for change, reason in (({}, "lora_A is missing"), ({name: tensors[name] * np.nan}, "not finite")):
        rest = {key: tensor for key, tensor in tensors.items() if key != name}
        weights.write_bytes(safetensors_bytes({**rest, **change}, "float32"))
        with pytest.raises(AdapterError, match=reason):
            load_adapter(path, config, rank_max=64)
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(AdapterError, match="safetensors"):
        load_adapter(path, config, rank_max=64)
    (path / "adapter_config.json").write_text("{")
    with pytest.raises(AdapterError):
        load_adapter(path, config, rank_max=64)


def test_the_least_recently_used_adapter_is_dropped(base: Path, tmp_path: Path) -> None:
    """Two places: after a, b, a, c it is b that is gone; a new digest under an old path is loaded anew."""
    cache = AdapterCache(load_model_config(base), capacity=2, rank_max=64)
    paths = {name: str(random_adapter(tmp_path / name, base)) for name in "abc"}
    first = cache.get(paths["a"], "1")
    cache.get(paths["b"], "1")
    assert cache.get(paths["a"], "1") is first
    cache.get(paths["c"], "1")
    shutil.rmtree(paths["a"])
    shutil.rmtree(paths["b"])
    assert cache.get(paths["a"], "1") is first, "still in memory"
    with pytest.raises(AdapterError):
        cache.get(paths["b"], "1")
    with pytest.raises(AdapterError):
        cache.get(paths["a"], "2")


def test_an_adapter_is_applied_only_if_it_is_what_the_catalogue_names(base: Path, tmp_path: Path) -> None:
    """Invariant 10: the right digest loads; one changed byte, or a folder that is gone, is a fault of the node."""
    cache = AdapterCache(load_model_config(base), capacity=1, rank_max=64)
    folder = random_adapter(tmp_path / "a", base)
    digest = version_digest(folder)
    assert cache.get(str(folder), digest).rank == 4
    cache.get(str(random_adapter(tmp_path / "b", base)), "1")  # a leaves the memory
    weights = folder / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(AdapterMismatch):
        cache.get(str(folder), digest)
    shutil.rmtree(folder)
    with pytest.raises(AdapterMismatch):
        cache.get(str(folder), digest)
