"""Start and watch the processes of a distributed training."""
