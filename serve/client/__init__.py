"""An HTTP client for served models, and its wire formats."""
