"""Make a trained PyTorch model small and fast, and prove what was kept."""

__version__ = "0.1.0.dev0"
