"""Models that come in as exported files (`.onnx`, `.pt2`, TorchScript)."""
