"""ONNX files in a browser: a page that runs and measures one, and the gate that opens it."""
