"""How processes share a training: one class for each strategy."""
