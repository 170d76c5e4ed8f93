"""Counts the samples that differ between the data of this run and of an earlier one."""

from __future__ import annotations

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
    """Save the hashes of each split's samples in a store, under the split's digest.

    They only make explanations more precise, so that a failure to write them is ignored.
    """
    with suppress(OSError):
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

    Of long splits not every sample is hashed: then the number is a lower bound, and only splits of
    the same length are compared.

    Args:
        store: the store's folder.
        before: what :attr:`Contents.parts` was for an earlier run.
        now: the data now.
    """
    past = before.get("splits", {})
    for split, parts in now.parts["splits"].items():
        if split in past and past[split] != parts:
            try:
                hashes = _hash_file(store, past[split]).read_bytes()
            except OSError:
                return ""
            pair = _counted(hashes), _counted(now.hashes[split].tobytes())
            samples = past[split]["samples"], parts["samples"]
            exact = all(of.total() == count for of, count in zip(pair, samples, strict=True))
            words = (
                _format_difference(*pair) if exact else _format_sampled_difference(*pair, *samples)
            )
            return words and f"data.{split}: {words}"
    return ""


def _hash_file(store: Path, parts: dict[str, Any]) -> Path:
    return store / FOLDER / f"{parts['sha256'][:32]}.hashes"


def _counted(hashes: bytes) -> Counter[bytes]:
    places = range(0, len(hashes), BYTES_OF_A_HASH)
    return Counter(hashes[place : place + BYTES_OF_A_HASH] for place in places)


def _format_difference(before: Counter[bytes], now: Counter[bytes]) -> str:
    new, gone = (now - before).total(), (before - now).total()
    if new == gone == 0:
        return "the same samples in another order"
    if new == gone:
        return f"{new} of {now.total()} samples differ"
    return f"{new} samples are new, {gone} are gone"


def _format_sampled_difference(
    before: Counter[bytes], now: Counter[bytes], past: int, samples: int
) -> str:
    new = (now - before).total()
    return f"at least {new} of {samples} samples differ" if new and past == samples else ""
