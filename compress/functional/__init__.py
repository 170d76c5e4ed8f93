"""Stages as functions of a module and data in memory; see `docs/notebook.md`."""
