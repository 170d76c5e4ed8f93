"""What a terminal shows: progress, colours, JSON or quiet output."""
