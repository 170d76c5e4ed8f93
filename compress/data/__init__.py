"""Splits, batches, loaders, the sample cache and the data's fingerprint."""
