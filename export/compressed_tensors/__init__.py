"""Weights of a few bits in the format of compressed-tensors, which vLLM and transformers read."""
