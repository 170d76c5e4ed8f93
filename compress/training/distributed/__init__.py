"""One module for each way to share training between processes."""
