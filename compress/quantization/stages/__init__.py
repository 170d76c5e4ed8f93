"""The quantization stages: settings and `run`, one module each."""
