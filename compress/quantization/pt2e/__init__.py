"""What is built on torchao's PT2E: quantizer, observers, ranges."""
