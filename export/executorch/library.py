"""Import ExecuTorch without what its modules do to the process beside."""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def quiet_library() -> Iterator[None]:
    """Drop warnings about executorch's own code in a block, and keep the log's handlers."""
    # Its XNNPACK partitioner (1.5.1) calls logging.basicConfig when it is imported.
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            root.setLevel(level)
            for handler in [h for h in root.handlers if h not in handlers]:
                root.removeHandler(handler)
