"""Networks and faults of `benchmarks/explain.py`."""
