"""Runs a plan: cache lookup, stage, gates, events, report."""
