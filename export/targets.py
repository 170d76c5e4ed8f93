"""Whether a graph was quantized for the runtime that it is exported to."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compress.core.artifact import Artifact

logger = logging.getLogger(__name__)


def warn_of_another(model: Artifact, fitting: tuple[str, ...], title: str) -> None:
    """Log that a graph was quantized for another runtime: it is right there, and may be slow.

    Args:
        model: what is exported; a float model is for every runtime.
        fitting: targets that quantize for this one, the usual one first.
        title: name of the stage that exports.
    """
    target = model.manifest.facts.get("target")
    if target is not None and target not in fitting:
        logger.warning(
            "%s: the graph was quantized for %s, whose patterns are not all fused here; quantize "
            "with `target: %s`",
            *(title, target, fitting[0]),
        )
