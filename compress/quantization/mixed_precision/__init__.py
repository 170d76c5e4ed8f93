"""Which layers keep more bits, or floats."""
