"""The cache of artifacts and measurements, local and shared."""
