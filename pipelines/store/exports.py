"""Exports of a run's uncompressed model in its store, so that later runs find them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from compress.common.dependency_recorder import recording
from compress.core.context import ExportCache
from compress.pipelines.store.entry import Record
from compress.pipelines.system.machine_info import machine, versions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from compress.artifacts.artifact import Artifact
    from compress.pipelines.store.local import Store


class StoredExports(ExportCache):
    """Exports by everything that decides them: model and runtime, versions, and the machine."""

    def __init__(self, store: Store) -> None:
        """Use a store."""
        super().__init__()
        self.store = store

    def _find_or_write(self, key: str, write: Callable[[Path], Artifact]) -> Artifact:
        parts: dict[str, Any] = {
            "uncompressed": key,
            "versions": versions(),
            "machine": machine(),  # compiled code is for one kind of processor
        }
        entry = self.store.entry(parts)
        found = self.store.get(entry)
        if found is not None:
            return found[0]
        began = time.monotonic()
        with recording() as recorded:
            artifact = write(entry.artifact_path)
        record = Record(
            parts=parts,
            digest=artifact.digest,
            seconds=time.monotonic() - began,
            depends=self.store.surroundings.dependencies(recorded),
        )
        self.store.commit(key, entry, record)
        return artifact
