"""Which models of a search are checked next, and which are trained."""
