"""Make a trained PyTorch model small and fast, and prove what was kept.

The public names stand in ``__init__.pyi``, for type checkers and for lazy_loader, which imports
each on first use: ``compress --help`` must not import torch.
"""

import lazy_loader

__version__ = "0.1.0.dev0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
