"""Quantization-aware training: fake quantization and its modules."""
