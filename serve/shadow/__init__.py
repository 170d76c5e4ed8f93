"""Compares a share of a server's answers with the uncompressed model's, beside the load."""
