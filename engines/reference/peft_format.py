"""Loads LoRA adapters in PEFT format, checked against the base, and keeps the last used ones in memory."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.reference.checkpoint import read_safetensors
from engines.reference.lora import Group, LoraAdapter, LoraDelta, Projection, projections
from engines.reference.model_config import CheckpointError, ModelConfig
from engines.reference.sampling_params import InvalidRequest
from engines.reference.tiled_matmul import TiledMatrix
from roundhouse.catalogue.lora_format import LAYER_TENSOR, UNSUPPORTED_SETTINGS

Array = NDArray[np.float32]


class AdapterError(InvalidRequest):
    """An adapter that cannot be applied to this base."""

    def __init__(self, why: str) -> None:
        """The request's parameter at fault is always its adapter."""
        super().__init__("adapter", why)


class AdapterMismatch(Exception):
    """The folder does not hold the version that the catalogue names: nobody's request is at fault (invariant 10)."""


class AdapterCache:
    """The adapters last used, at most `capacity`; requests that run keep theirs alive whatever is dropped here."""

    def __init__(self, config: ModelConfig, capacity: int, rank_max: int) -> None:
        """Adapters over `rank_max` are refused: their cost grows with the rank."""
        self._config = config
        self._capacity = capacity
        self._rank_max = rank_max
        self._adapters: OrderedDict[str, LoraAdapter] = OrderedDict()
        self._lock = Lock()

    def get(self, path: str, digest: str) -> LoraAdapter:
        """The adapter in folder `path`, loaded when it is not in memory; raises `AdapterError`, `AdapterMismatch`.

        A digest of the catalogue's kind (`sha256:…`) is checked against the files, and is the key: the loader may keep
        the same content in two places. Else the path is part of it. Thread-safe.
        """
        key = digest if digest.startswith("sha256:") else f"{path}\n{digest}"
        with self._lock:
            adapter = self._adapters.get(key)
            if adapter is None:
                check_digest(Path(path), digest)
                adapter = load_adapter(Path(path), self._config, self._rank_max)
                self._adapters[key] = adapter
            self._adapters.move_to_end(key)
            while len(self._adapters) > self._capacity:
                self._adapters.popitem(last=False)
            return adapter


def check_digest(folder: Path, digest: str) -> None:
    """Raise `AdapterMismatch` unless the files have the catalogue's digest; other digests are only names."""
    if not digest.startswith("sha256:"):
        return
    from roundhouse.catalogue.digests import version_digest  # only adapters need it: a cold load stays quick
    from roundhouse.errors import RoundhouseError

    try:
        found = version_digest(folder)
    except RoundhouseError as error:
        raise AdapterMismatch(f"{folder.name} cannot be read") from error
    if found != digest:
        raise AdapterMismatch(f"{folder.name} has another digest than the catalogue names")


def load_adapter(folder: Path, config: ModelConfig, rank_max: int) -> LoraAdapter:
    """Read `adapter_config.json` and `adapter_model.safetensors`; raises `AdapterError` saying what does not fit."""
    try:
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = read_safetensors(folder / "adapter_model.safetensors")
    except FileNotFoundError:
        raise AdapterError(f"adapter_config.json is not in {folder.name}") from None
    except (ValueError, CheckpointError) as error:
        raise AdapterError(str(error)) from error
    rank, scaling = _check_settings(settings, rank_max)
    targets = _targets(settings, config)
    pairs = _pairs(tensors, targets, config)
    deltas: dict[tuple[int, Group], tuple[LoraDelta, ...]] = {}
    for (layer, name), pair in sorted(pairs.items()):
        group, delta = _delta(f"layer {layer} {name}", pair, targets[name], rank, scaling)
        deltas[layer, group] = (*deltas.get((layer, group), ()), delta)
    return LoraAdapter(folder.name, rank, deltas, sum(tensor.nbytes for tensor in tensors.values()))


def _check_settings(settings: Any, rank_max: int) -> tuple[int, float]:
    """Rank and scaling; refuses variants whose result would be wrong."""
    if not isinstance(settings, dict) or settings.get("peft_type", "LORA") != "LORA":
        raise AdapterError("adapter_config.json: peft_type must be LORA")
    if settings.get("bias", "none") != "none":
        raise AdapterError(f"adapter_config.json: bias {settings['bias']!r} is not supported")
    for name in UNSUPPORTED_SETTINGS:
        if settings.get(name):
            raise AdapterError(f"adapter_config.json: {name} is not supported")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= rank_max:
        raise AdapterError(f"adapter_config.json: r must be in [1, {rank_max}], not {rank!r}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise AdapterError(f"adapter_config.json: lora_alpha must be a number, not {alpha!r}")
    return rank, alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank


def _targets(settings: Mapping[str, Any], config: ModelConfig) -> dict[str, Projection]:
    """The targeted projections by their name with parent."""
    known = projections(config)
    named = settings.get("target_modules")
    if named == "all-linear":
        return known
    if not isinstance(named, list) or not named:
        raise AdapterError("adapter_config.json: target_modules must be a list of module names")
    short = {name.split(".")[1]: name for name in known}
    unknown = sorted(str(name) for name in named if str(name).split(".")[-1] not in short)
    if unknown:
        raise AdapterError(f"adapter_config.json: target_modules {unknown} are not in [{', '.join(short)}]")
    return {short[name.split(".")[-1]]: known[short[name.split(".")[-1]]] for name in named}


def _pairs(
    tensors: Mapping[str, Array], targets: Iterable[str], config: ModelConfig
) -> dict[tuple[int, str], dict[str, Array]]:
    """Tensors by layer and projection, then by `A` or `B`."""
    wanted = frozenset(targets)
    pairs: dict[tuple[int, str], dict[str, Array]] = {}
    for key, tensor in tensors.items():
        match = LAYER_TENSOR.match(key)
        if match is None:
            raise AdapterError(f"tensor {key} is not a LoRA tensor of this engine")
        layer, name, side = int(match[1]), match[2], match[3]
        if layer >= config.layers:
            raise AdapterError(f"made for another base: layer {layer}, this base has {config.layers} layers")
        if name not in wanted:
            raise AdapterError(f"tensor {key} is not of a target module")
        pairs.setdefault((layer, name), {})[side] = tensor
    if not pairs:
        raise AdapterError("adapter_model.safetensors holds no tensor")
    return pairs


def _delta(
    where: str, pair: Mapping[str, Array], projection: Projection, rank: int, scaling: float
) -> tuple[Group, LoraDelta]:
    for side, shape in (("A", (rank, projection.inputs)), ("B", (projection.outputs, rank))):
        if side not in pair:
            raise AdapterError(f"{where}: lora_{side} is missing")
        if pair[side].shape != shape:
            raise AdapterError(
                f"made for another base or rank: {where} lora_{side} is {list(pair[side].shape)}, not {list(shape)}"
            )
        if not np.isfinite(pair[side]).all():
            raise AdapterError(f"{where}: lora_{side} holds values that are not finite")
    start, stop = projection.start, projection.start + projection.outputs
    scaled = (pair["B"] * np.float32(scaling)).astype(np.float32)
    return projection.group, LoraDelta(TiledMatrix(pair["A"]), TiledMatrix(scaled), start, stop)
