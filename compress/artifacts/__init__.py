"""Sealed model directories, and how a module is rebuilt from one."""
