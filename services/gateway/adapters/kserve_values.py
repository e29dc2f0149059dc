"""Tensor elements as JSON values and protobuf lists, and back. Only agreement of values with the datatype is checked.

Source: KServe v2 (Open Inference Protocol), "Tensor data" of REST and `InferTensorContents` of gRPC.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from roundhouse.errors import InvalidInput
from services.gateway.domain.tensors import BYTES, DIMENSIONS_MAX, Tensor, check_tensor, element_count

_NUMPY = {
    "BOOL": "?",
    "UINT8": "<u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "<i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
_LENGTH = struct.Struct("<I")


def tensor_of_values(name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> Tensor:
    """A tensor of JSON values, nested or flat. Raises InvalidInput where count or kind disagree."""
    count = element_count(name, datatype, shape)
    flat = list(_flattened(name, values, 0))
    if len(flat) != count:
        raise InvalidInput(f"input '{name}': its shape takes {count} values, but there are {len(flat)}.", param=name)
    if datatype == BYTES:
        return Tensor(name, datatype, tuple(shape), _strings(name, flat))
    return Tensor(name, datatype, tuple(shape), _numbers(name, datatype, flat))


def _flattened(name: str, values: Sequence[Any], depth: int) -> Iterable[Any]:
    if depth > DIMENSIONS_MAX:
        raise InvalidInput(f"input '{name}': its data is nested too deep.", param=name)
    for value in values:
        if isinstance(value, list):
            yield from _flattened(name, value, depth + 1)
        else:
            yield value


def _strings(name: str, values: Sequence[Any]) -> bytes:
    pieces: list[bytes] = []
    for value in values:
        if not isinstance(value, str):
            raise InvalidInput(f"input '{name}' takes strings.", param=name)
        data = value.encode()
        pieces += (_LENGTH.pack(len(data)), data)
    return b"".join(pieces)


def _numbers(name: str, datatype: str, values: Sequence[Any]) -> bytes:
    if datatype not in _NUMPY:
        raise InvalidInput(f"input '{name}': {datatype} is sent as binary data.", param=name)
    kinds = {type(value) for value in values}
    allowed = {"BOOL": {bool}}.get(datatype, {int, float} if datatype.startswith("FP") else {int})
    if not kinds <= allowed:
        raise InvalidInput(f"input '{name}' takes {datatype} values.", param=name)
    if values and "INT" in datatype:
        limits = np.iinfo(_NUMPY[datatype])
        if min(values) < limits.min or max(values) > limits.max:
            raise InvalidInput(f"input '{name}': a value is not a {datatype}.", param=name)
    try:
        with np.errstate(over="ignore"):  # a number beyond FP32 becomes infinite, as everywhere
            return np.array(values, dtype=_NUMPY[datatype]).tobytes()
    except (OverflowError, ValueError) as error:
        raise InvalidInput(f"input '{name}': a value is not a {datatype}.", param=name) from error


def values_of(tensor: Tensor) -> list[Any]:
    """The elements of a tensor as flat JSON values. Raises InvalidInput for datatypes that JSON cannot hold."""
    check_tensor(tensor)
    if tensor.datatype == BYTES:
        return [data.decode("utf-8", "replace") for data in strings_of(tensor.data)]
    if tensor.datatype not in _NUMPY:
        raise InvalidInput(f"output '{tensor.name}' is {tensor.datatype}: ask for it as binary data.", param="outputs")
    values: list[Any] = np.frombuffer(tensor.data, dtype=_NUMPY[tensor.datatype]).tolist()
    return values


def strings_of(data: bytes) -> list[bytes]:
    """The elements of a BYTES tensor whose lengths were checked."""
    found: list[bytes] = []
    offset = 0
    while offset < len(data):
        (length,) = _LENGTH.unpack_from(data, offset)
        found.append(data[offset + _LENGTH.size : offset + _LENGTH.size + length])
        offset += _LENGTH.size + length
    return found


_CONTENTS_FIELD = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}


def tensor_of_contents(name: str, datatype: str, shape: Sequence[int], contents: Any) -> Tensor:
    """A tensor of protobuf's `InferTensorContents`. Raises InvalidInput where count or field disagree."""
    count = element_count(name, datatype, shape)
    field = _CONTENTS_FIELD.get(datatype)
    filled = [descriptor.name for descriptor, _ in contents.ListFields()]
    if field is None or filled not in ([], [field]):
        raise InvalidInput(f"input '{name}': its contents are not {datatype}.", param=name)
    values = getattr(contents, field)
    if len(values) != count:
        raise InvalidInput(f"input '{name}': its shape takes {count} values, but there are {len(values)}.", param=name)
    if datatype == BYTES:
        data = b"".join(_LENGTH.pack(len(value)) + value for value in values)
        return Tensor(name, datatype, tuple(shape), data)
    return Tensor(name, datatype, tuple(shape), _numbers(name, datatype, list(values)))
