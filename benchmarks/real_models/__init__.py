"""Models that others trained, taken from packages, and samples for them."""
