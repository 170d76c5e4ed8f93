"""Optimizer, clipping, activation checkpointing and compilation."""
