"""Compare exported files with their source, and report where they differ."""
