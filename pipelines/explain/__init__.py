"""`compress explain` and `compress repair`: why a gate refused a stage, and what would pass."""
