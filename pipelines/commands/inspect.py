"""What an artifact says about itself, in lines for people."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from compress.artifacts.artifact import Artifact


def describe_artifact(found: Artifact) -> Iterator[str]:
    """Yield a line for each thing that an artifact's manifest holds.

    A line break in a name is shown as such: what follows would pass for a line of its own.
    """
    yield from (line.replace("\n", r"\n") for line in _lines(found))


def _lines(found: Artifact) -> Iterator[str]:
    manifest = found.manifest.model_dump(mode="json")
    yield f"{found.kind} artifact, digest {found.digest}"
    for label in ("inputs", "outputs"):
        for spec in manifest["signature"][label]:
            shape = f" {spec['dtype']} {spec['shape']}" if "shape" in spec else ""
            yield f"  {label[:-1]} {spec['name']}{shape}"
    if found.manifest.recipe:
        yield f"  built by {found.manifest.recipe.factory} {found.manifest.recipe.arguments}"
    for step in found.manifest.lineage:
        yield f"  after {step.stage} {json.dumps(step.settings, default=str)}"
    for name, file in found.manifest.files.items():
        yield f"  file {name}  {file.bytes} bytes  sha256 {file.sha256}"
