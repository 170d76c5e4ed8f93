"""Commands that measure many variants of a model."""
