"""From a validated export to a server: TorchServe, Triton and KServe packages, and a client.

The public names stand in ``__init__.pyi``; each is imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
