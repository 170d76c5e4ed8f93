"""Measure a model in several runtimes, to find the fastest one."""
