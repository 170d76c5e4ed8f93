"""Losses, teacher losses and constraints on weights."""
