"""Rewrites of the ONNX graph for integer, few-bit and half-precision kernels."""
