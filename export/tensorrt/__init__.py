"""The TensorRT exporter: engines by way of ONNX or torch-tensorrt."""
