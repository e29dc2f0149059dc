"""Whether a tensor is what it says it is, decided before a byte of it is sent on (case B43).

Shape, datatype and bytes must agree exactly; nothing is allocated by what a shape claims. Source: KServe v2 (Open
Inference Protocol), "Tensor data types" and "Raw tensor contents".
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from roundhouse.errors import InvalidInput

ELEMENT_BYTES = {
    "BOOL": 1,
    "UINT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "INT8": 1,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "FP16": 2,
    "BF16": 2,
    "FP32": 4,
    "FP64": 8,
}
BYTES = "BYTES"
DIMENSIONS_MAX = 16  # a guess: no model has half as many
DIMENSION_MAX = 2**31 - 1
INPUTS_MAX = 256  # a guess
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Tensor:
    """One KServe v2 tensor, its elements as raw little-endian bytes (BYTES: each with a 4-byte length before it)."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output that a model declares. -1 in `shape` = any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """Inputs and outputs of a model, with the batch dimension where there is one."""

    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def element_count(name: str, datatype: str, shape: Sequence[int]) -> int:
    """How many elements the shape says there are. Raises InvalidInput for a shape or datatype that cannot be."""
    if datatype != BYTES and datatype not in ELEMENT_BYTES:
        raise InvalidInput(f"input '{name}': '{datatype[:20]}' is not a datatype.", param=name)
    if len(shape) > DIMENSIONS_MAX:
        raise InvalidInput(f"input '{name}': at most {DIMENSIONS_MAX} dimensions.", param=name)
    if any(not 0 <= dimension <= DIMENSION_MAX for dimension in shape):
        raise InvalidInput(f"input '{name}': a dimension is negative or too large.", param=name)
    return math.prod(shape)


def check_tensor(tensor: Tensor) -> None:
    """Raise InvalidInput unless the bytes are exactly those of the shape."""
    count = element_count(tensor.name, tensor.datatype, tensor.shape)
    if tensor.datatype == BYTES:
        _check_strings(tensor, count)
        return
    wanted = count * ELEMENT_BYTES[tensor.datatype]
    if len(tensor.data) != wanted:
        raise InvalidInput(
            f"input '{tensor.name}': its shape takes {wanted} bytes, but there are {len(tensor.data)}.",
            param=tensor.name,
        )


def _check_strings(tensor: Tensor, count: int) -> None:
    """Walk the length prefixes; O(elements), and no more steps than bytes."""
    offset, found, size = 0, 0, len(tensor.data)
    while offset + _LENGTH.size <= size:
        offset += _LENGTH.size + _LENGTH.unpack_from(tensor.data, offset)[0]
        found += 1
    if offset != size or found != count:
        raise InvalidInput(f"input '{tensor.name}': its bytes are not {count} strings with lengths.", param=tensor.name)


def check_names(names: Sequence[str]) -> None:
    """Raise InvalidInput unless there are some inputs, not too many, each once."""
    if not 0 < len(names) <= INPUTS_MAX:
        raise InvalidInput(f"a request has 1 to {INPUTS_MAX} inputs.", param="inputs")
    if len(set(names)) != len(names):
        raise InvalidInput("the same input is given twice.", param="inputs")


def check_against(tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> None:
    """Raise InvalidInput where tensors are not the model's inputs: name, datatype, shape (-1 takes any size)."""
    known = {spec.name: spec for spec in specs}
    missing = sorted(set(known) - {tensor.name for tensor in tensors})
    for tensor in tensors:
        spec = known.get(tensor.name)
        if spec is None:
            raise InvalidInput(f"the model has no input '{tensor.name[:100]}'.", param="inputs")
        if tensor.datatype != spec.datatype:
            raise InvalidInput(f"input '{spec.name}' takes {spec.datatype}, not {tensor.datatype}.", param=spec.name)
        fits = len(tensor.shape) == len(spec.shape) and all(
            wanted in (-1, given) for given, wanted in zip(tensor.shape, spec.shape, strict=True)
        )
        if not fits:
            raise InvalidInput(
                f"input '{spec.name}' takes the shape {list(spec.shape)}, not {list(tensor.shape)}.", param=spec.name
            )
    if missing:
        raise InvalidInput(f"the input '{missing[0]}' is missing.", param="inputs")
