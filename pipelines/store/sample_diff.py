"""Counts the samples that differ between the data of this run and of an earlier one."""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from compress.common.atomic_files import remove, write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    from compress.data.fingerprint import Contents

FOLDER = "samples"
KEPT = 16
"""Number of splits whose hashes stay in a store; the oldest are removed."""
BYTES_OF_A_HASH = 16


def note_samples(store: Path, contents: Contents) -> None:
    """Save the hashes of each split's samples in a store, under the split's digest."""
    with suppress(OSError):  # they only make explanations more precise
        (store / FOLDER).mkdir(exist_ok=True)
        for split, parts in contents.parts["splits"].items():
            file = _hash_file(store, parts)
            if not file.exists():
                write_atomically(file, contents.hashes[split].tobytes())
        by_age = sorted((store / FOLDER).glob("*.hashes"), key=lambda file: file.stat().st_mtime_ns)
        for old in by_age[:-KEPT]:
            remove(old)


def samples_changed(store: Path, before: dict[str, Any], now: Contents) -> str:
    """Describe how many samples of the first changed split differ; empty if that is not known.

    `before` is what :attr:`Contents.parts` was for an earlier run.
    """
    past = before.get("splits", {})
    for split, parts in now.parts["splits"].items():
        if split in past and past[split] != parts:
            try:
                hashes = _hash_file(store, past[split]).read_bytes()
            except OSError:
                return ""
            if hashlib.sha256(hashes).hexdigest() != past[split]["sha256"]:
                return ""  # changed since
            old, current = _counted(hashes), _counted(now.hashes[split].tobytes())
            old_count, count = past[split]["samples"], parts["samples"]
            new, gone = (current - old).total(), (old - current).total()
            if (old.total(), current.total()) != (old_count, count):
                # Of long splits not every sample is hashed: the number is a lower bound, and means
                # something between splits of the same length alone.
                is_known = new and old_count == count
                return f"data.{split}: at least {new} of {count} samples differ" if is_known else ""
            if new == gone == 0:
                return f"data.{split}: the same samples in another order"
            if new == gone:
                return f"data.{split}: {new} of {count} samples differ"
            return f"data.{split}: {new} samples are new, {gone} are gone"
    return ""


def _hash_file(store: Path, parts: dict[str, Any]) -> Path:
    return store / FOLDER / f"{parts['sha256'][:32]}.hashes"


def _counted(hashes: bytes) -> Counter[bytes]:
    places = range(0, len(hashes), BYTES_OF_A_HASH)
    return Counter(hashes[place : place + BYTES_OF_A_HASH] for place in places)
