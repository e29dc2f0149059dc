"""Bodies of KServe v2 REST: JSON, or JSON followed by binary tensors, both ways.

Source: KServe v2 (Open Inference Protocol) and Triton's binary tensor data extension. `Inference-Header-Content-Length`
says where the JSON ends. Explicit nulls count as absent; parameters that would change the meaning are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from roundhouse.errors import InvalidInput
from services.gateway.adapters.http_requests import DIGITS_MAX
from services.gateway.adapters.kserve_values import tensor_of_values, values_of
from services.gateway.domain.tensors import Tensor

HEADER_LENGTH = "inference-header-content-length"
UNSUPPORTED = frozenset({"sequence_id", "sequence_start", "sequence_end", "shared_memory_region", "classification"})
_encode = msgspec.json.Encoder().encode


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] | None = None
    data: list[Any] | None = None


class _Output(msgspec.Struct):
    name: str
    given_parameters: dict[str, Any] | None = msgspec.field(name="parameters", default=None)

    @property
    def parameters(self) -> dict[str, Any]:
        return self.given_parameters or {}


class _Body(msgspec.Struct):
    inputs: list[_Input]
    id: str | None = None
    outputs: list[_Output] | None = None
    parameters: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class InferBody:
    """A parsed request. `binary` says of an output whether it is wanted as binary data."""

    id: str | None
    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...]
    binary: Mapping[str, bool]
    binary_default: bool


_decode = msgspec.json.Decoder(_Body).decode


def parse_infer(data: bytes, header_length: str | None) -> InferBody:
    """Parse a body. Raises InvalidInput for anything that is not what it says it is (case B43)."""
    split = len(data) if header_length is None else _split_of(header_length, len(data))
    try:
        body = _decode(data[:split])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        text = str(error) if isinstance(error, msgspec.ValidationError) else "The body is not valid JSON."
        raise InvalidInput(text) from error
    refuse_unsupported(body.parameters)
    binary_data = memoryview(data)[split:]
    inputs: list[Tensor] = []
    offset = 0
    for one in body.inputs:
        refuse_unsupported(one.parameters)
        tensor, used = _input(one, binary_data[offset:])
        inputs.append(tensor)
        offset += used
    if offset != len(binary_data):
        raise InvalidInput(f"there are {len(binary_data) - offset} bytes of binary data too many.")
    for output in body.outputs or ():
        refuse_unsupported(output.parameters)
    return InferBody(
        id=body.id,
        inputs=tuple(inputs),
        outputs=tuple(output.name for output in body.outputs or ()),
        binary={o.name: bool(o.parameters["binary_data"]) for o in body.outputs or () if "binary_data" in o.parameters},
        binary_default=bool((body.parameters or {}).get("binary_data_output", False)),
    )


def refuse_unsupported(parameters: Mapping[str, Any] | None) -> None:
    """Raise InvalidInput for a parameter that would change what the answer means."""
    for name in parameters or ():
        if name in UNSUPPORTED:
            raise InvalidInput(f"the parameter '{name}' is not supported.", code="unsupported_parameter", param=name)


def _split_of(header_length: str, size: int) -> int:
    is_number = header_length.isascii() and header_length.isdigit() and len(header_length) <= DIGITS_MAX
    if not (is_number and int(header_length) <= size):
        raise InvalidInput("Inference-Header-Content-Length is not within the body.", param=HEADER_LENGTH)
    return int(header_length)


def _input(one: _Input, rest: memoryview) -> tuple[Tensor, int]:
    size = (one.parameters or {}).get("binary_data_size")
    if size is None:
        if one.data is None:
            raise InvalidInput(f"input '{one.name}' has no data.", param=one.name)
        return tensor_of_values(one.name, one.datatype, one.shape, one.data), 0
    if one.data is not None or not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(rest):
        raise InvalidInput(f"input '{one.name}': its binary_data_size is not within the body.", param=one.name)
    return Tensor(one.name, one.datatype, tuple(one.shape), bytes(rest[:size])), size


def infer_answer(model: str, version: str, body: InferBody, outputs: tuple[Tensor, ...]) -> tuple[bytes, int | None]:
    """The answer's body, and the length of its JSON part if binary data follows."""
    entries: list[dict[str, Any]] = []
    binaries: list[bytes] = []
    for tensor in outputs:
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        if body.binary.get(tensor.name, body.binary_default):
            entry["parameters"] = {"binary_data_size": len(tensor.data)}
            binaries.append(tensor.data)
        else:
            entry["data"] = values_of(tensor)
        entries.append(entry)
    answer: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": entries}
    if body.id is not None:
        answer["id"] = body.id
    head = _encode(answer)
    return (head, None) if not binaries else (head + b"".join(binaries), len(head))
