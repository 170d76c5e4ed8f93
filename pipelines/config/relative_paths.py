"""Paths of a pipeline file that is written into another folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

MODEL_PATHS = ("checkpoint", "huggingface", "file")
"""Settings of `model:` that are paths relative to the pipeline file."""


def relocated(content: dict[str, Any], folder: Path, to: Path) -> dict[str, Any]:
    """Return a pipeline's content with paths relative to another folder."""
    model = dict(content["model"])
    for name in MODEL_PATHS:
        if model.get(name):
            model[name] = _relative(folder, model[name], to)
    found = {**content}
    if depends := content.get("depends"):
        files = [_relative(folder, name, to) for name in depends.get("files", ())]
        found["depends"] = {**depends, "files": files}
    return {**found, "code": _relative(folder, content.get("code", "."), to), "model": model}


def _relative(folder: Path, path: str, to: Path) -> str:
    return os.path.relpath((folder / path).resolve(), to.resolve())
