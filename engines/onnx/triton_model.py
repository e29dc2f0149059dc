"""An ONNX graph as a model of Triton's Python backend. One request at a time; errors stay with their request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """What the stub process instantiates."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the graph on one thread, because many models share the cores."""
        config = json.loads(args["model_config"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        path = config["parameters"]["weights_path"]["string_value"]
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._inputs = [(value.name, value.type) for value in self._session.get_inputs()]
        self._outputs = [value.name for value in self._session.get_outputs()]

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Run each request by itself."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            feeds = {name: self._feed(request, name, kind) for name, kind in self._inputs}
            results = self._session.run(self._outputs, feeds)
        except Exception as error:  # noqa: BLE001 - onnxruntime's exceptions share no base of their own
            text = f"invalid_request: {type(error).__name__}: {str(error)[:500]}"
            return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(text))
        tensors = [self._tensor(name, array) for name, array in zip(self._outputs, results, strict=True)]
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def _feed(self, request: Any, name: str, kind: str) -> Any:
        """The input as onnxruntime wants it: Triton gives strings as bytes, onnxruntime wants text."""
        array = pb_utils.get_input_tensor_by_name(request, name).as_numpy()
        if kind != "tensor(string)":
            return array
        return np.array([value.decode("utf-8") for value in array.reshape(-1)], dtype=np.object_).reshape(array.shape)

    def _tensor(self, name: str, array: Any) -> Any:
        if array.dtype == np.object_:
            encoded = [str(value).encode("utf-8") for value in array.reshape(-1)]
            array = np.array(encoded, dtype=np.object_).reshape(array.shape)
        return pb_utils.Tensor(name, array)
