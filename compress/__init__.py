"""Make a trained PyTorch model small and fast, and prove what was kept.

The public names stand in ``__init__.pyi``, for type checkers and for lazy_loader, which imports
each on first use: ``compress --help`` must not import torch.
"""

import logging

import lazy_loader

from compress.common.printable import ShownInNotebooks
from compress.version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
ShownInNotebooks.html_of = lambda result: __getattr__("html_of")(result)


def _is_no_import_noise(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return "Failed to load" not in text and "is an Enum subclass" not in text


# What torchao 0.18 logs where it is imported: absent CUDA libraries, its own deprecations. Here, as
# transformers imports it, too, from the user's code.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).addFilter(_is_no_import_noise)
