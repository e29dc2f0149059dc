"""ONNX graphs through onnxruntime, as KServe v2 tensors."""
