"""Find what a dataset's samples were made of, such as image files and texts, if it holds them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

DEPTH = 4  # datasets that wrap one another, at most
MOST_FIELDS = 8  # of a sample's list; longer ones are token ids or pixels


def raw_columns(dataset: Any, indices: Sequence[int]) -> dict[str, list[Any]]:
    """Return everything that a dataset holds one of for each sample, by name, for some samples.

    Columns of a Hugging Face dataset, also those that its format leaves out, and of a data frame;
    attributes as long as the dataset, such as `samples` of torchvision's folders; those of datasets
    that it wraps. A file's name becomes its path where its folder is another attribute.
    """
    rows: list[dict[str, Any]] = [{}]
    with suppress(Exception):  # attributes may fail in any way; none of them need be read
        rows = [dict(_entries(dataset, index, DEPTH)) for index in indices]
    names = [name for name in rows[0] if all(name in row for row in rows)]
    return {name: [row[name] for row in rows] for name in names}


def _entries(dataset: Any, index: int, depth: int) -> Iterator[tuple[str, Any]]:
    if isinstance(dataset, Subset):
        yield from _entries(dataset.dataset, dataset.indices[index], depth)
    elif isinstance(dataset, ConcatDataset):
        part = bisect_right(dataset.cumulative_sizes, index)
        first = dataset.cumulative_sizes[part - 1] if part else 0
        yield from _entries(dataset.datasets[part], index - first, depth)
    elif hasattr(dataset, "with_format"):  # of Hugging Face
        yield from _fields("", dataset.with_format(None)[index])
    elif hasattr(dataset, "iloc"):  # a data frame, or a column of one
        row = dataset.iloc[index]
        yield from _fields("", dict(row) if hasattr(row, "items") else row)
    else:
        held = vars(dataset)
        paths = [Path(value) for value in held.values() if isinstance(value, str | Path)]
        folders = [path for path in paths if path.is_dir()]
        for name, value in held.items():
            with suppress(TypeError):  # has no length, as numbers and tensors without axes
                if len(value) != len(dataset):
                    continue
                is_column = isinstance(value, list | tuple | np.ndarray | torch.Tensor)
                found: Iterator[tuple[str, Any]] = iter(())
                if is_column:
                    found = _fields("", value[index])
                elif depth and hasattr(value, "__dict__"):
                    found = _entries(value, index, depth - 1)
                for field, entry in found:
                    yield f"{name}.{field}".removesuffix("."), _located(entry, folders)


def _fields(name: str, entry: Any) -> Iterator[tuple[str, Any]]:
    """Yield an entry, or what a mapping or tuple holds, with names."""
    if isinstance(entry, list | tuple) and len(entry) <= MOST_FIELDS:
        entry = dict(enumerate(entry))
    if not isinstance(entry, Mapping):
        yield name, entry
        return
    for key, value in entry.items():
        yield from _fields(f"{name}.{key}".removeprefix("."), value)


def _located(entry: Any, folders: Sequence[Path]) -> Any:
    """Return the path of the file that an entry names; other entries as they are."""
    if isinstance(entry, str | Path):
        with suppress(OSError):  # a text may be too long for a name
            return next((f / entry for f in (Path(), *folders) if (f / entry).is_file()), entry)
    return entry
