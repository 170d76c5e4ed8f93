"""Parts of the benchmark of `compress auto`."""
