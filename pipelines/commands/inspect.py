"""`compress inspect`: an artifact's manifest as lines of text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact


def describe_artifact(found: Artifact) -> list[str]:
    """Return lines for the signature, recipe, lineage and files of an artifact's manifest."""
    recipe, lineage, files = found.manifest.recipe, found.manifest.lineage, found.manifest.files
    signature = found.manifest.signature.model_dump(mode="json")
    lines = [f"{found.kind} artifact, digest {found.digest}"]
    for label in ("inputs", "outputs"):
        for spec in signature[label]:
            shape = f" {spec['dtype']} {spec['shape']}" if "shape" in spec else ""
            lines.append(f"  {label[:-1]} {spec['name']}{shape}")
    if recipe:
        lines.append(f"  built by {recipe.factory} {recipe.arguments}")
    lines += [f"  after {s.stage} {json.dumps(s.settings, default=str)}" for s in lineage]
    lines += [f"  file {n}  {f.bytes} bytes  sha256 {f.sha256}" for n, f in files.items()]
    # A name from an untrusted manifest could forge another line.
    return [line.replace("\n", r"\n") for line in lines]
