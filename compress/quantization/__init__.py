"""Quantization: the same model computed in small integers."""
