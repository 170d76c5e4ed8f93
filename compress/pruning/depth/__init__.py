"""Which blocks can be left out, by the output error that this causes."""
