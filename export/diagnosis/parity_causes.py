"""Causes of outputs that differ."""

PARITY_CAUSES = ()
