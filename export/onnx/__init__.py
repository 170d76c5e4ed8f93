"""The ONNX exporter, its artifact, and how ONNX Runtime opens it."""
