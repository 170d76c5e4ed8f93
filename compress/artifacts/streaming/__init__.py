"""Models whose weights stay on disk, of which one part at a time is in memory."""
