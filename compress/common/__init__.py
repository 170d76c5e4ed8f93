"""Types and helpers that know no model format: errors, settings, signature, forward calls."""
