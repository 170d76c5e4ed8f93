"""Quantization: post-training, quantization-aware, dynamic, weight-only, mixed precision."""
