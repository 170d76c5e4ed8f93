"""The ExecuTorch exporter: a `.pte` file for devices, computed by XNNPACK."""
