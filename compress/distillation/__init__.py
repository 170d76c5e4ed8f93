"""Distillation: a model learns from the answers of another."""
