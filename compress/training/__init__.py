"""Training: the step loop, its parallel strategies, and resuming where it was interrupted."""
