"""The contract of the toolkit: stage, context, gate and metric."""
