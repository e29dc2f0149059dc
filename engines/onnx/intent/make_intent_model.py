"""Writes `intent.onnx`, the demo's classifier: two dense layers over 16 features, four intents.

Run it by hand (`python -m engines.onnx.intent.make_intent_model`) where the `onnx` package is installed; the file is
kept with the code, so that serving it needs onnxruntime alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

FEATURES, HIDDEN, INTENTS = 16, 32, 4

# Opset 17 and IR version 8 are read by every onnxruntime since 1.12.
OPSET, IR_VERSION = 17, 8


def intent_model(seed: int = 0) -> bytes:
    """`features` FP32 `[batch, 16]` to `label` INT64 `[batch]` and `probabilities` FP32 `[batch, 4]`."""
    random = np.random.default_rng(seed)

    def weights(name: str, rows: int, columns: int) -> TensorProto:
        values = random.standard_normal((rows, columns), dtype=np.float32) * np.float32(rows**-0.5)
        return numpy_helper.from_array(values, name)

    initializers = [weights("first", FEATURES, HIDDEN), weights("second", HIDDEN, INTENTS)]
    nodes = [
        helper.make_node("MatMul", ["features", "first"], ["sums"]),
        helper.make_node("Relu", ["sums"], ["hidden"]),
        helper.make_node("MatMul", ["hidden", "second"], ["scores"]),
        helper.make_node("Softmax", ["scores"], ["probabilities"], axis=-1),
        helper.make_node("ArgMax", ["scores"], ["label"], axis=-1, keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "intent",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["batch", FEATURES])],
        [
            helper.make_tensor_value_info("label", TensorProto.INT64, ["batch"]),
            helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", INTENTS]),
        ],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    serialized: bytes = model.SerializeToString(deterministic=True)
    return serialized


if __name__ == "__main__":
    Path(__file__).with_name("intent.onnx").write_bytes(intent_model())
