"""The pipeline file as settings: YAML, validation, the registry of stages."""
