"""The step loop and what it updates: weights, optimizer, EMA, checkpoints, logs."""
