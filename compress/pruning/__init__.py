"""Pruning: channels, heads, blocks and single weights."""
