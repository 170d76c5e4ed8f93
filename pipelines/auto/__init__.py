"""`compress auto`: the models that lose least under limits of latency and size."""
