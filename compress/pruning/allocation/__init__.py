"""How many channels leave each layer, and within which budget."""
