"""Decoders behind OpenAI's HTTP interface."""
