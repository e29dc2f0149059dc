"""Whether LoRA weights fit a base: rank, target modules, shapes. From headers alone: no tensor is read.

Checked when an adapter is declared and again by the loader that staged it, so no engine sees one that does not fit; the
engine's own check stays the last. Format: `peft` `save_pretrained` (adapter_config.json, adapter_model.safetensors).
A base whose projections cannot be told from its config.json is only checked for what the two files say of each other;
over vLLM it is refused then, whose engine ends for everybody at an adapter that it cannot load (tried, vLLM 0.32).
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from roundhouse.catalogue.base_shape import BaseShape, base_shape
from roundhouse.catalogue.lora_format import (
    ANY_TENSOR,
    INITS_THAT_LEAVE_THE_BASE,
    LAYER_TENSOR,
    RANK_MAX,
    UNSUPPORTED_SETTINGS,
)
from roundhouse.catalogue.records import Engine, Model
from roundhouse.catalogue.sizes import safetensors_header
from roundhouse.errors import InvalidInput, NotFound

ADAPTER_INVALID = "adapter_invalid"
"""`code` of every refusal here."""
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_CONFIG_BYTES_MAX = 1_000_000  # a guess; real ones have a kilobyte
_CHECKED_BY_LAYER = (Engine.REFERENCE, Engine.VLLM)


def rank_max_over(base: Model) -> int:
    """The highest rank that a base's engine has room for."""
    return base.adapter_rank_max if base.engine is Engine.VLLM else RANK_MAX


def check_adapter(
    folder: Path, engine: Engine, base_config: Mapping[str, Any] | None, rank_max: int = RANK_MAX
) -> None:
    """Raises InvalidInput with code ADAPTER_INVALID, saying what does not fit. Blocking; reads two headers.

    `base_config` is the base's config.json, None = it cannot be read here; `rank_max` what the base has room for."""
    settings = _settings(folder)
    rank = _check_settings(settings, rank_max)
    try:
        header = safetensors_header(folder / WEIGHTS_FILE)
    except InvalidInput as error:
        raise _refused(error.message) from error
    except NotFound as error:
        raise _refused(f"{WEIGHTS_FILE} is not there") from error
    shapes = {name: _shape_of(name, entry) for name, entry in header.items() if name != "__metadata__"}
    if not shapes:
        raise _refused(f"{WEIGHTS_FILE} holds no tensor")
    shape = base_shape(base_config) if base_config is not None else None
    if engine is Engine.VLLM and shape is None and base_config is not None:
        raise _refused("the base's config.json does not tell its projections, so nothing shows that it fits")
    if engine in _CHECKED_BY_LAYER and shape is not None:
        _check_against(shapes, rank, _targets(settings, shape), shape)
    else:
        _check_pairs(shapes, rank, settings, shape)


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    try:
        if file.stat().st_size > _CONFIG_BYTES_MAX:
            raise _refused(f"{CONFIG_FILE} is larger than {_CONFIG_BYTES_MAX} bytes")
        settings = json.loads(file.read_bytes())
    except OSError as error:
        raise _refused(f"{CONFIG_FILE} is not there") from error
    except (ValueError, RecursionError) as error:
        raise _refused(f"{CONFIG_FILE} is not JSON: {error}") from error
    if not isinstance(settings, dict) or settings.get("peft_type", "LORA") != "LORA":
        raise _refused(f"{CONFIG_FILE}: peft_type must be LORA")
    return settings


def _check_settings(settings: Mapping[str, Any], rank_max: int) -> int:
    """The rank."""
    if settings.get("bias", "none") != "none":
        raise _refused(f"{CONFIG_FILE}: bias {settings['bias']!r} is not supported")
    for name in UNSUPPORTED_SETTINGS:
        if settings.get(name):
            raise _refused(f"{CONFIG_FILE}: {name} is not supported")
    init = settings.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in INITS_THAT_LEAVE_THE_BASE:
        raise _refused(f"{CONFIG_FILE}: init_lora_weights {init!r} is not supported: it changes the base's weights")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= rank_max:
        raise _refused(f"{CONFIG_FILE}: r must be in [1, {rank_max}], not {rank!r}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise _refused(f"{CONFIG_FILE}: lora_alpha must be a number, not {alpha!r}")
    return rank


def _named_targets(settings: Mapping[str, Any]) -> list[str] | None:
    """The short names of the target modules; None = all linear ones."""
    named = settings.get("target_modules")
    if named == "all-linear":
        return None
    if not isinstance(named, list) or not named or not all(isinstance(each, str) for each in named):
        raise _refused(f"{CONFIG_FILE}: target_modules must be a list of module names")
    return [name.split(".")[-1] for name in named]


def _targets(settings: Mapping[str, Any], shape: BaseShape) -> frozenset[str]:
    """The targeted projections by their name with parent."""
    named = _named_targets(settings)
    if named is None:
        return frozenset(shape.projections)
    short = {name.split(".")[1]: name for name in shape.projections}
    unknown = sorted(set(named) - short.keys())
    if unknown:
        raise _refused(f"{CONFIG_FILE}: target_modules {unknown} are not in [{', '.join(short)}]")
    return frozenset(short[name] for name in named)


def _check_against(shapes: Mapping[str, tuple[int, ...]], rank: int, targets: frozenset[str], base: BaseShape) -> None:
    """Every tensor is one of a target's pair in a layer that is there, with that projection's shape."""
    pairs: dict[tuple[int, str], dict[str, tuple[int, ...]]] = {}
    for key, shape in shapes.items():
        match = LAYER_TENSOR.match(key)
        if match is None:
            raise _refused(f"tensor {key} is not a LoRA tensor that the engine knows")
        layer, name = int(match[1]), match[2]
        if layer >= base.layers:
            raise _refused(f"made for another base: layer {layer}, this base has {base.layers} layers")
        if name not in targets:
            raise _refused(f"tensor {key} is not of a target module")
        pairs.setdefault((layer, name), {})[match[3]] = shape
    for (layer, name), pair in sorted(pairs.items()):
        outputs, inputs = base.projections[name]
        _check_pair(f"layer {layer} {name}", pair, {"A": (rank, inputs), "B": (outputs, rank)})


def _check_pairs(
    shapes: Mapping[str, tuple[int, ...]], rank: int, settings: Mapping[str, Any], base: BaseShape | None
) -> None:
    """Tensors come in pairs of the rank, of target modules; where the base tells, of its shapes."""
    named = _named_targets(settings)
    short = {name.split(".")[1]: size for name, size in base.projections.items()} if base is not None else {}
    pairs: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
    for key, shape in shapes.items():
        match = ANY_TENSOR.match(key)
        if match is None:
            raise _refused(f"tensor {key} is not a LoRA tensor")
        if named is not None and match[1] not in named:
            raise _refused(f"tensor {key} is not of a target module")
        pairs.setdefault((key[: match.start(2) - len(".lora_")], match[1]), {})[match[2]] = shape
    for (where, name), pair in sorted(pairs.items()):
        outputs, inputs = short.get(name) or (_size(pair, "B", 0), _size(pair, "A", 1))
        _check_pair(where, pair, {"A": (rank, inputs), "B": (outputs, rank)})


def _check_pair(where: str, pair: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, int]]) -> None:
    for side, shape in wanted.items():
        if side not in pair:
            raise _refused(f"{where}: lora_{side} is missing")
        if pair[side] != shape:
            raise _refused(
                f"made for another base or rank: {where} lora_{side} is {list(pair[side])}, not {list(shape)}"
            )


def _size(pair: Mapping[str, tuple[int, ...]], side: str, axis: int) -> int:
    shape = pair.get(side, ())
    return shape[axis] if len(shape) == 2 else 0


def _shape_of(name: str, entry: Any) -> tuple[int, ...]:
    shape: Iterable[Any] | None = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or not all(isinstance(each, int) and each >= 0 for each in shape):
        raise _refused(f"{WEIGHTS_FILE}: tensor {name!r} has no shape")
    return tuple(shape)


def _refused(why: str) -> InvalidInput:
    return InvalidInput(why, code=ADAPTER_INVALID, param="adapter")
