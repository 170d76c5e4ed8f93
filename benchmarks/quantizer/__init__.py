"""Parts of the benchmarks of quantization."""
