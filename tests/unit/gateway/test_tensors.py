"""Tensors that are what they say, and tensors that are not (case B43)."""

import struct
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as kserve

from roundhouse.errors import InvalidInput
from services.gateway.adapters.kserve_bodies import infer_answer, parse_infer
from services.gateway.adapters.kserve_values import tensor_of_contents, tensor_of_values, values_of
from services.gateway.domain.tensors import Tensor, TensorSpec, check_against, check_names, check_tensor


def strings(*texts: bytes) -> bytes:
    """BYTES elements with their lengths."""
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("x", "FP32", (2, 3), bytes(24)),
        Tensor("x", "BOOL", (), b"\x01"),
        Tensor("x", "BYTES", (2,), strings(b"a", b"")),
        Tensor("x", "FP32", (0, 5), b""),
    ],
)
def test_bytes_that_fit_the_shape_pass(tensor: Tensor) -> None:
    """A scalar has one element; a dimension of 0 has none."""
    check_tensor(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("x", "FP32", (-1, 16), bytes(64)),
        Tensor("x", "FP32", (2, 16), bytes(64)),
        Tensor("x", "FP32", (10**9, 10**9), b""),
        Tensor("x", "FP32", (2**62, 2**62), b""),
        Tensor("x", "FP33", (1,), bytes(4)),
        Tensor("x", "BYTES", (2,), strings(b"a")),
        Tensor("x", "BYTES", (1,), struct.pack("<I", 2**32 - 1) + b"a"),
        Tensor("x", "BYTES", (1,), b"abc"),
        Tensor("x", "FP32", (1,) * 40, bytes(4)),
    ],
)
def test_bytes_that_do_not_fit_are_refused(tensor: Tensor) -> None:
    """Nothing is allocated by what a shape claims."""
    with pytest.raises(InvalidInput):
        check_tensor(tensor)


def test_tensors_are_compared_with_the_models_inputs() -> None:
    """-1 takes any size; name, datatype, rank and fixed sizes must agree; none may be missing or given twice."""
    specs = (TensorSpec("x", "FP32", (-1, 16)),)
    check_against([Tensor("x", "FP32", (7, 16), b"")], specs)
    for wrong in (
        [Tensor("y", "FP32", (1, 16), b"")],
        [Tensor("x", "INT32", (1, 16), b"")],
        [Tensor("x", "FP32", (1, 15), b"")],
        [Tensor("x", "FP32", (16,), b"")],
        [],
    ):
        with pytest.raises(InvalidInput):
            check_against(wrong, specs)
    for names in ([], ["x", "x"]):
        with pytest.raises(InvalidInput):
            check_names(names)


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("FP32", [1.5, -2, 0]),
        ("INT8", [-128, 127]),
        ("UINT64", [2**64 - 1, 0]),
        ("BOOL", [True, False]),
        ("BYTES", ["ď", ""]),
        ("FP64", [1e300]),
    ],
)
def test_json_values_survive_the_round_trip(datatype: str, values: list[Any]) -> None:
    """Nested or flat, they come back flat and equal."""
    nested = tensor_of_values("x", datatype, [1, len(values)], [values])
    assert values_of(nested) == values
    assert nested == tensor_of_values("x", datatype, [1, len(values)], values)


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("INT8", [128]),
        ("UINT8", [-1]),
        ("INT32", [1.5]),
        ("INT32", [True]),
        ("BOOL", [1]),
        ("BYTES", [1]),
        ("BF16", [1]),
    ],
)
def test_json_values_of_another_kind_are_refused(datatype: str, values: list[Any]) -> None:
    """Out of range, or of another type."""
    with pytest.raises(InvalidInput):
        tensor_of_values("x", datatype, [1], values)


def test_typed_contents_of_grpc() -> None:
    """The field of the datatype, and only that one."""
    contents = kserve.InferTensorContents(int_contents=[1, -2])
    assert np.frombuffer(tensor_of_contents("x", "INT16", [2], contents).data, "<i2").tolist() == [1, -2]
    for datatype, shape in (("FP32", [2]), ("INT16", [3])):
        with pytest.raises(InvalidInput):
            tensor_of_contents("x", datatype, shape, contents)


def test_binary_and_json_outputs_stand_side_by_side() -> None:
    """One output was asked for as binary data: it follows the JSON, whose length is told."""
    head = b'{"id":"7","inputs":[{"name":"x","shape":[1],"datatype":"INT32","parameters":{"binary_data_size":4}}],'
    head += b'"outputs":[{"name":"a","parameters":{"binary_data":true}},{"name":"b"}]}'
    body = parse_infer(head + b"\x05\x00\x00\x00", str(len(head)))
    assert body.inputs == (Tensor("x", "INT32", (1,), b"\x05\x00\x00\x00"),)
    outputs = (Tensor("a", "INT32", (1,), b"\x01\x00\x00\x00"), Tensor("b", "INT32", (1,), b"\x02\x00\x00\x00"))
    data, length = infer_answer("m", "1", body, outputs)
    assert length is not None
    assert data[length:] == b"\x01\x00\x00\x00"
    assert b'"data":[2]' in data[:length]
    assert b'"id":"7"' in data[:length]
