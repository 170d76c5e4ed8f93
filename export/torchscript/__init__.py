"""The TorchScript exporter: trace, script or a mix, and torch's integer kernels."""
