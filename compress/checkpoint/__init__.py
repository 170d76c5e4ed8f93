"""Reading and writing weights without unpickling anything."""
