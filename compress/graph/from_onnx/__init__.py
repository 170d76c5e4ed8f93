"""ONNX files as PyTorch modules."""
