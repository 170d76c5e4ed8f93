"""What models are trained for: tasks, losses, and the targets that show both."""
