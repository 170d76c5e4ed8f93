"""`compress inspect`: an artifact's manifest as lines of text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from compress.artifacts.artifact import Artifact


def describe_artifact(found: Artifact) -> Iterator[str]:
    """Yield lines for the signature, recipe, lineage and files of an artifact's manifest."""
    # A name from an untrusted manifest could forge another line.
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
