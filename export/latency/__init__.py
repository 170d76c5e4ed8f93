"""Latency of ONNX models, predicted from the kernels that onnxruntime runs them with."""
