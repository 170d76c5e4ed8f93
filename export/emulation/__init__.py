"""Processors in emulation: ONNX Runtime's kernels for them, run by QEMU."""
