"""Order, types and requirements of stages, checked before anything runs."""
