"""Training: the step loop, parallel strategies and resuming."""
