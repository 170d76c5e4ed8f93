"""Reads what files hold: columns of images, texts or numbers, and labels, by split."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice
from math import fsum
from pathlib import Path
from typing import Any

import numpy as np

from compress.artifacts.model_source import installed_version
from compress.common.atomic_files import RACY_SECONDS
from compress.common.errors import PipelineInvalid
from compress.common.requirements import require_all
from compress.data.splits import UNLABELLED
from compress.pipelines.config.data_spec import (
    DATASETS,
    PARQUET,
    ArrayData,
    AudioData,
    FileData,
    HuggingFaceData,
    ImageData,
    TableData,
)

SPLITS = {
    **{name: name for name in ("train", "val", "test", "calibration", "unlabelled")},
    **{"training": "train", "valid": "val", "validation": "val", "dev": "val", "testing": "test"},
    **dict.fromkeys(("unlabeled", "unsupervised"), "unlabelled"),
}
"""Names of folders, files and arrays that hold a split → the split."""
IMAGE_SUFFIXES = frozenset((".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"))
SOUND_SUFFIXES = frozenset((".flac", ".wav"))
LABELS = ("label", "labels", "y", "target", "targets")  # usual names of what is predicted
WHOLE = ""  # the name of samples that are not divided into splits
MOST_SHOWN = 5  # names in a message
MISSPELT = 0.8  # likeness of two words, by `difflib`, from which on one is the other, misspelt

Parts = dict[str, "Records"]


@dataclass(frozen=True)
class StoredImages:
    """A column of images in a dataset of Hugging Face's, each read when it is asked for."""

    dataset: Any
    name: str

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        entry = self.dataset[index][self.name]
        return entry and (entry["bytes"] or Path(entry["path"]))


@dataclass(frozen=True)
class Records:
    """Samples as files hold them: columns of one length, and labels where there are any."""

    columns: Mapping[str, Any]
    labels: Any = None
    names: tuple[str, ...] = ()
    """Names of the classes that numbers among the labels stand for, where the file tells them."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def rows(self, indices: Sequence[int]) -> Records:
        """Return some of the samples, in an order."""

        def chosen(column: Any) -> Any:
            if isinstance(column, np.ndarray):
                return column[np.asarray(indices, int)]
            if isinstance(column, StoredImages):
                return StoredImages(column.dataset.select(indices), column.name)
            return [column[i] for i in indices]

        labels = None if self.labels is None else chosen(self.labels)
        columns = {name: chosen(column) for name, column in self.columns.items()}
        return replace(self, columns=columns, labels=labels)


def read_records(spec: FileData, folder: Path) -> Parts:
    """Return what a `data:` section's files hold, by split; PipelineInvalid names what is wrong."""
    parts = read_parts(spec, folder)
    divided = sorted(name for name in parts if name != WHOLE)
    if WHOLE not in parts:
        if spec.split:
            raise PipelineInvalid(
                f"split: {spec.place} is divided into {', '.join(divided)}; leave `split` out"
            )
        (first, columns), *others = ((name, part.columns) for name, part in parts.items())
        for name, each in others:
            if each.keys() != columns.keys():
                raise PipelineInvalid(
                    f"{spec.place}: inputs of {name} are {_listed(each)}, and of {first} "
                    f"{_listed(columns)}"
                )
            # Files may hold them in another order.
            parts[name] = replace(parts[name], columns={n: each[n] for n in columns})
        return parts
    if divided:
        raise PipelineInvalid(
            f"{spec.place}: besides {', '.join(divided)}, there are samples that belong to no split"
        )
    if not spec.split:
        raise PipelineInvalid(
            f"{spec.place} is not divided into train, val and test; say how many samples are for "
            "judging, such as `split: {val: 0.2, test: 0.1}`"
        )
    return divide(parts[WHOLE], {str(n): share for n, share in spec.split.items()})


def read_parts(spec: FileData, folder: Path) -> Parts:
    """Return what files hold, by the split that they name; samples of none are `WHOLE`."""
    place = folder / spec.place
    if not place.exists():
        raise PipelineInvalid(f"{spec.place}: no such file or folder (in {folder})")
    try:
        if isinstance(spec, ImageData):
            return _class_folders(place, "images", IMAGE_SUFFIXES)
        if isinstance(spec, AudioData):
            return _class_folders(place, "sounds", SOUND_SUFFIXES)
        if isinstance(spec, TableData):
            return _each_file(place, lambda file: {WHOLE: _table(spec, file)})
        if isinstance(spec, ArrayData):
            return _each_file(place, lambda file: _arrays(spec, file))
        assert isinstance(spec, HuggingFaceData)
        return _hugging_face(spec, place)
    except (OSError, UnicodeError, ValueError, csv.Error) as error:
        raise PipelineInvalid(f"{spec.place}: {error}") from error


def divide(records: Records, shares: Mapping[str, float]) -> Parts:
    """Return samples as splits: the same ones each time, and as many of each class."""
    by_class: dict[Any, list[int]] = defaultdict(list)
    labels = records.labels
    is_class = labels is not None and np.asarray(labels).ndim == 1
    is_class = is_class and np.asarray(labels).dtype.kind in "iuUO"
    for i in range(len(records)):
        by_class[labels[i] if is_class else None].append(i)
    generator = np.random.default_rng(0)
    chosen: dict[str, list[int]] = defaultdict(list)
    # What rounding leaves over in a class counts for the next one, or 9 of 10 small classes would
    # have nobody in `val`.
    due = dict.fromkeys(shares, 0.0)
    for indices in by_class.values():
        order, first = generator.permutation(indices).tolist(), 0
        for name, share in shares.items():
            due[name] += share * len(order)
            count = min(round(due[name]), len(order) - first)
            due[name] -= count
            chosen[name] += order[first : first + count]
            first += count
        chosen["train"] += order[first:]
    if fsum(shares.values()) == 1:
        del chosen["train"]
    for name, indices in chosen.items():
        if not indices:
            raise PipelineInvalid(f"split: {name} gets none of {len(records)} samples")
    return {name: records.rows(sorted(indices)) for name, indices in chosen.items()}


def files_below(place: Path) -> Iterator[Path]:
    """Yield files, also those of linked folders, without hidden ones."""
    for folder, folders, names in os.walk(place, followlinks=True):
        own = Path(folder).resolve()
        folders[:] = [
            name
            for name in folders
            # A link to a folder that it lies in would give the same images again and again.
            if not (name.startswith(".") or own.is_relative_to(Path(folder, name).resolve()))
        ]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def state_of_files(spec: FileData, folder: Path) -> str:
    """Hash names, sizes and times of a section's files, and what decides how they are read."""
    digest, newest = hashlib.sha256(), 0.0
    for need in spec.requirements:
        digest.update(f"{need.what} {installed_version(need.what)} ".encode())
    files = sorted(Path(__file__).parent.glob("*.py"))
    classes = spec.classes if isinstance(spec.classes, str) else ""
    for name in filter(None, (spec.place, classes, getattr(spec.prepare, "tokenizer", ""))):
        place = folder / name
        files += sorted(files_below(place)) if place.is_dir() else [place]
    for file in files:
        with suppress(OSError):  # a missing one is named by whoever reads it
            now = file.stat()
            newest = max(newest, now.st_ctime)
            times = f"{now.st_mtime_ns} {now.st_ctime_ns}"
            digest.update(f"{file}\0{now.st_ino} {now.st_size} {times}\0".encode())
    if time.time() - newest < RACY_SECONDS:
        digest.update(os.urandom(16))  # it may change again without a new time
    return digest.hexdigest()


def _class_folders(place: Path, kind: str, suffixes: frozenset[str]) -> Parts:
    if not place.is_dir():
        raise PipelineInvalid(f"{place.name} is a file, expected a folder of {kind}")
    found: dict[str, list[tuple[Path, str | None]]] = defaultdict(list)
    others: set[str] = set()
    for file in sorted(files_below(place)):
        within = file.relative_to(place).parts
        if file.suffix.lower() not in suffixes:
            others.add(file.name)
            continue
        split = SPLITS.get(within[0].lower(), WHOLE) if len(within) > 1 else WHOLE
        above = within[1:-1] if split else within[:-1]
        found[split].append((file, above[0] if above else None))
    if not found:
        shown = f", but {', '.join(sorted(others)[:MOST_SHOWN])}" if others else ""
        raise PipelineInvalid(
            f"{place.name} holds no {kind} ({', '.join(sorted(suffixes))}){shown}"
        )
    parts = {}
    for split, pairs in found.items():
        labels = [label for _, label in pairs]
        unlabelled = [file for file, label in pairs if label is None]
        if 0 < len(unlabelled) < len(pairs):
            raise PipelineInvalid(
                f"{unlabelled[0].relative_to(place.parent)} lies in no folder of a class, as "
                f"{len(pairs) - len(unlabelled)} other {kind} do"
            )
        parts[split] = Records({kind: [file for file, _ in pairs]}, None if unlabelled else labels)
    return parts


def _each_file(place: Path, read: Callable[[Path], Parts]) -> Parts:
    """Read a file, or all of a folder, whose names are those of splits."""
    if place.is_file():
        return read(place)
    parts: Parts = {}
    for file in sorted(place.iterdir()):
        if split := SPLITS.get(file.stem.lower()):
            for name, records in read(file).items():
                if name != WHOLE or split in parts:
                    raise PipelineInvalid(f"{file.name}: split {split!r} is there twice")
                parts[split] = records
    if not parts:
        raise PipelineInvalid(f"{place.name} is a folder without train.csv, val.csv or the like")
    return parts


def _table(spec: TableData, file: Path) -> Records:
    labels = (spec.label,) if isinstance(spec.label, str) else spec.label or ()
    not_inputs = labels
    if SPLITS.get(file.stem.lower()) == UNLABELLED:
        labels = ()
    inputs = (spec.text,) if spec.text else spec.columns
    columns: dict[str, Any] = defaultdict(list)
    rows = rows_of(file)
    for number, row in enumerate(rows, 1):
        inputs = inputs or tuple(name for name in row if name not in not_inputs)
        for name in (*inputs, *labels):
            if row.get(name) is None or row[name] == "":
                if name in row:
                    problem = f"row {number} has no value in column {name!r}"
                else:
                    problem = f"there is no column {name!r}, but {_listed(row)}"
                raise PipelineInvalid(f"{file.name}: {problem}")
            columns[name].append(row[name])
    if not columns or not inputs:
        raise PipelineInvalid(f"{file.name} has no {'columns of inputs' if columns else 'rows'}")
    target: Any = None
    if len(labels) > 1:
        target = np.stack([_numbers(file, name, columns[name]) for name in labels], axis=1)
    elif labels:
        target = columns[labels[0]]
    # Parquet files that `datasets` wrote name the classes that numbers stand for.
    features = getattr(rows, "features", {}) if len(labels) == 1 else {}
    names = tuple(getattr(features.get(labels[0]), "names", ())) if features else ()
    if spec.text:
        return Records({"text": [str(text) for text in columns[spec.text]]}, target, names)
    return Records({name: _numbers(file, name, columns[name]) for name in inputs}, target, names)


def rows_of(file: Path) -> Iterable[Mapping[str, Any]]:
    """Return a table's rows, by column."""
    if file.suffix.lower() not in PARQUET:
        return _rows_of_text(file)
    require_all((DATASETS,), file.name)
    from datasets import Dataset

    rows: Iterable[Mapping[str, Any]] = Dataset.from_parquet(str(file), keep_in_memory=True)
    return rows


def _rows_of_text(file: Path) -> Iterator[Mapping[str, Any]]:
    suffix = file.suffix.lower()
    if suffix in (".jsonl", ".ndjson", ".json"):
        text = file.read_text(encoding="utf-8-sig")
        is_list = text.lstrip().startswith("[")
        # Not `splitlines`, which splits texts at further characters.
        lines = filter(str.strip, text.split("\n"))
        for row in json.loads(text) if is_list else map(json.loads, lines):
            if not isinstance(row, dict):
                raise PipelineInvalid(f"{file.name}: expected one JSON object for each row")
            yield row
    elif suffix in (".csv", ".tsv"):
        with file.open(encoding="utf-8-sig", newline="") as opened:
            header = opened.readline()
            opened.seek(0)
            # Spreadsheets write semicolons where numbers have decimal commas.
            separator = ";" if ";" in header and "," not in header else ","
            separator = "\t" if suffix == ".tsv" else separator
            for number, row in enumerate(csv.DictReader(opened, delimiter=separator), 1):
                if None in row:
                    raise PipelineInvalid(f"{file.name}: row {number} has more cells than columns")
                yield row
    else:
        raise PipelineInvalid(f"{file.name}: expected .csv, .tsv, .jsonl or .parquet")


def _listed(names: Iterable[str]) -> str:
    first = list(islice(names, MOST_SHOWN + 1))
    return ", ".join(map(repr, first[:MOST_SHOWN])) + (", …" if len(first) > MOST_SHOWN else "")


def _numbers(file: Path, name: str, column: Sequence[Any]) -> np.ndarray[Any, Any]:
    try:
        numbers = np.array(column, np.float32)
    except (TypeError, ValueError) as error:
        raise PipelineInvalid(f"{file.name}: column {name!r}: {error}") from None
    if (bad := np.argwhere(~np.isfinite(numbers))).size:
        row = bad[0, 0]
        raise PipelineInvalid(
            f"{file.name}: row {row + 1}, column {name!r}: {column[row]!r} is no number"
        )
    return numbers


def _arrays(spec: ArrayData, file: Path) -> Parts:
    if file.suffix == ".npy":
        arrays = {"input": np.load(file, allow_pickle=False)}
    elif file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    else:
        raise PipelineInvalid(f"{file.name}: expected .npz or .npy")
    by_split: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, array in arrays.items():
        words = re.split(r"[_.-]", name)
        split = next((SPLITS[w] for w in (words[0], words[-1]) if w in SPLITS), WHOLE)
        own = "_".join(word for word in words if SPLITS.get(word) != split) or "input"
        by_split[split][own if split else name] = array
    parts = {}
    for split, columns in by_split.items():
        by_name = {name.lower(): name for name in columns}
        label = spec.label or next((by_name[name] for name in LABELS if name in by_name), None)
        if spec.label and spec.label not in columns and split != UNLABELLED:
            raise PipelineInvalid(f"label: {file.name} has no {label!r}, but {_listed(columns)}")
        labels = columns.pop(label, None) if label else None
        near = (n for n in columns if get_close_matches(n.lower(), LABELS, 1, MISSPELT))
        if label is None and (misspelt := next(near, None)):  # it would be an input
            raise PipelineInvalid(
                f"{file.name}: no array is named {' or '.join(LABELS)}, and {misspelt!r} nearly "
                f"is: rename it, or give label: {misspelt}"
            )
        lengths = {
            len(x) if x.ndim else 0
            for x in (*columns.values(), *([] if labels is None else [labels]))
        }
        if len(lengths) != 1 or not columns:
            shown = ", ".join(f"{name} {list(x.shape)}" for name, x in arrays.items())
            raise PipelineInvalid(f"{file.name}: expected arrays of equal length, found {shown}")
        if labels is not None and labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        parts[split] = Records(columns, labels)
    return parts


def _hugging_face(spec: HuggingFaceData, place: Path) -> Parts:
    import datasets

    is_saved = (place / "dataset_dict.json").is_file() or (place / "state.json").is_file()
    loaded = datasets.load_from_disk(str(place)) if is_saved else datasets.load_dataset(str(place))
    by_split = loaded if isinstance(loaded, Mapping) else {WHOLE: loaded}
    if [*by_split] == ["train"]:  # what `load_dataset` calls files without a split's name
        by_split = {WHOLE: by_split["train"]}
    parts = {}
    for name, dataset in by_split.items():
        label = spec.label or next((n for n in LABELS if n in dataset.column_names), None)
        inputs = (spec.image or spec.text,) if spec.columns is None else spec.columns
        for column in (*inputs, *((label,) if label else ())):
            if column not in dataset.column_names:
                raise PipelineInvalid(
                    f"{spec.huggingface} has no column {column!r}, but "
                    f"{_listed(dataset.column_names)}"
                )
        names = getattr(dataset.features[label], "names", ()) if label else ()
        columns: dict[str, Any]
        if spec.image:
            undecoded = dataset.cast_column(spec.image, datasets.Image(decode=False))
            columns = {"image": StoredImages(undecoded, spec.image)}
        elif spec.text:
            columns = {"text": list(dataset[spec.text])}
        else:
            columns = {c: np.array(dataset.with_format("numpy")[c]) for c in inputs if c}
        labels = list(dataset[label]) if label else None
        if labels and all(label == -1 for label in labels):
            labels = None  # as the hub marks samples without labels
        split = SPLITS.get(str(name), str(name))
        if split != WHOLE and split not in SPLITS.values():
            raise PipelineInvalid(f"{spec.huggingface}: {name!r} is none of {', '.join(SPLITS)}")
        parts[split] = Records(columns, labels, tuple(names))
    return parts
