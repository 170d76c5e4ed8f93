"""Latency and peak memory of models, measured."""
