"""Artifacts and reports whose digests vouch for what no run has written."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compress.artifacts.artifact import MANIFEST
from compress.common.sealed_json import read_report, write_report


def forge(folder: Path, name: str, content: bytes) -> None:
    """Replace a file of an artifact, and write a manifest that vouches for it."""
    manifest = json.loads((folder / MANIFEST).read_text())
    digest = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    manifest["files"][name] = digest
    for file, written in ((name, content), (MANIFEST, json.dumps(manifest).encode())):
        (folder / file).unlink()  # hard links share the bytes
        (folder / file).write_bytes(written)


def forge_report(out: Path, edit: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """Edit a run's `report.json` and `lock.json`, with digests computed anew."""
    report, lock = read_report(out / "report.json")
    edit(report, lock)
    write_report(out / "report.json", report, lock)
