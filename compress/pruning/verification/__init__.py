"""Check that a sliced model gives the outputs of its masked twin."""
