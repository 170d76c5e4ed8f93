"""Model repositories for NVIDIA Triton and KServe."""
