"""Distillation: a student trained on a teacher's outputs and features."""
