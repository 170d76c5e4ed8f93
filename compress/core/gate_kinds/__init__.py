"""Gates of :mod:`compress.core.gates` that look at more than outputs and sizes."""
