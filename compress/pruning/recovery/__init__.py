"""Least-squares refit and BatchNorm re-estimation after slicing."""
