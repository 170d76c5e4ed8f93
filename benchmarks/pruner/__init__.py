"""Parts of the benchmarks of pruning."""
