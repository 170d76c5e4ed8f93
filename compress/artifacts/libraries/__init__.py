"""Models that other libraries build: their factories, as recipes name them."""
