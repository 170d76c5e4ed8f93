"""Output on a terminal: results, errors, progress, JSON and quiet mode."""
