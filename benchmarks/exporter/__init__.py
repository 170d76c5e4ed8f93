"""Parts of the benchmarks of export."""
