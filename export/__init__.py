"""Formats that a model is deployed in: each an artifact type and the stage that writes it.

The public names stand in ``__init__.pyi``; each is imported on first use.
"""

import lazy_loader

from compress.core.gates.other_runtime import OTHER_RUNTIMES
from compress.export import baselines  # noqa: F401 - adds the runtimes that files are written for
from compress.export.web.runtime import WEB

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

OTHER_RUNTIMES["web"] = WEB
