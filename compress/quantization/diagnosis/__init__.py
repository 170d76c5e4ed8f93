"""Why an integer model loses accuracy: which layers, and for what reason."""
