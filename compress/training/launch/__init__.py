"""Processes and nodes of a distributed training."""
