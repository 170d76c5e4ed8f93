"""ONNX files that others trained, taken from packages: samples for them, and what they are for."""
