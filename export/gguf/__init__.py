"""Weights of a few bits in GGUF, which llama.cpp and what is built on it read."""
