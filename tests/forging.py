"""Artifacts and reports whose digests vouch for what no run has written."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compress.artifacts.artifact import MANIFEST
from compress.common.sealed_json import dump_sealed, load_sealed, read_report, write_report


def forge(folder: Path, name: str, content: bytes) -> None:
    """Replace a file of an artifact, and write a manifest that vouches for it."""
    (folder / name).unlink(missing_ok=True)  # hard links share the bytes
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    digest = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    forge_manifest(folder, lambda manifest: manifest["files"].update({name: digest}))


def forge_manifest(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit an artifact's manifest, with a digest computed anew."""
    manifest = load_sealed((folder / MANIFEST).read_bytes())
    edit(manifest)
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).write_bytes(dump_sealed(manifest, indent=1))


def forge_report(out: Path, edit: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """Edit a run's `report.json` and `lock.json`, with digests computed anew."""
    report, lock = read_report(out / "report.json")
    edit(report, lock)
    write_report(out / "report.json", report, lock)
