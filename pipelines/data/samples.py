"""Datasets of samples that are prepared as a server prepares a client's images and texts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset

from compress.common.errors import PipelineInvalid
from compress.data.batch import IGNORED_LABEL, LABELS, stack_columns
from compress.pipelines.config.data_spec import FileData, TableData
from compress.pipelines.config.model_spec import refuse_repeated
from compress.pipelines.data.records import MOST_SHOWN, Parts, Records, read_records
from compress.serve.packaging.val_preparation import image_body, sound_body
from compress.serve.worker.wire import audio_reader, image_reader, text_reader


@dataclass(frozen=True)
class Preparation:
    """How raw samples become the model's inputs, in this process or another one."""

    form: str = ""
    """`image`, `audio` or `text`; empty where numbers are inputs as they are."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the server's handler."""
    inputs: tuple[Mapping[str, Any], ...] = ()
    """The model's inputs, as the handler knows them."""
    tokenizer: str = ""
    """Content of a `tokenizer.json`; prepared samples are hashed, and show what it is."""
    class_names: tuple[str, ...] = ()
    """Classes that the model knows by name, in its order."""

    @property
    def pad_values(self) -> dict[str, int]:
        """What fills up the inputs of shorter texts."""
        fields = self.settings.get("fields", {})
        return {name: self.settings["pad_id"] for name, kind in fields.items() if kind == "ids"}


@dataclass(frozen=True)
class Files:
    """What :func:`load_files` reads."""

    spec: FileData
    preparation: Preparation
    folder: Path
    code: Path
    """The folder of the user's modules, the same for a pipeline file that is written elsewhere."""
    has_numbers: bool = False
    """Whether whole numbers among the labels are no classes, but what is predicted."""
    carried: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Files beside the model that tell the preparation to servers."""
    continues_texts: bool = False
    """Whether the targets of texts without labels are their own tokens."""

    @property
    def identity(self) -> dict[str, Any]:
        """The cache key's part: what decides the samples besides what the files hold."""
        spec, prepared = self.spec, self.preparation
        # How samples are read decides nothing about them.
        settings = spec.model_dump(mode="json", exclude={"batch_size", "loader", "prepare"})
        return {
            **settings,
            spec.key: os.path.relpath((self.folder / spec.place).resolve(), self.code),
            "prepare": {"form": prepared.form, **prepared.settings},
            "inputs": [*prepared.inputs],
            "class_names": [*prepared.class_names],
            "has_numbers": self.has_numbers,
            "continues_texts": self.continues_texts,
        }


class RawSamples(Dataset[Any]):
    """Images, sounds or texts, each prepared when it is asked for, with a target or without.

    With ``continues_texts`` a text without a target has its own tokens as labels, for a language
    model; padding does not count.
    """

    class_names: tuple[str, ...] = ()

    def __init__(
        self,
        raw: Sequence[Any],
        targets: Any,
        preparation: Preparation,
        continues_texts: bool = False,
    ) -> None:
        self.raw, self.targets, self.preparation = raw, targets, preparation
        self.continues_texts = continues_texts

    def __len__(self) -> int:
        return len(self.raw)

    def __getitem__(self, index: int) -> Any:
        entry, form = self.raw[index], self.preparation.form
        if form == "text":
            names = [spec["name"] for spec in self.preparation.inputs]
            rows = (torch.from_numpy(row[0]) for row in self._read([entry]))
            sample = dict(zip(names, rows, strict=True))
            if self.targets is not None:
                return {**sample, LABELS: self.targets[index]}
            return {**sample, LABELS: self._own_tokens(sample)} if self.continues_texts else sample
        place = entry if isinstance(entry, Path) else f"sample {index}"
        body = sound_body(entry) if form == "audio" else image_body(entry)
        if body is None:
            raise PipelineInvalid(f"{place} is no image that can be read")
        try:
            x = torch.from_numpy(self._read(body)[0][0])
        except ValueError as error:
            raise PipelineInvalid(f"{place}: {error.args[-1]}") from None
        return (x,) if self.targets is None else (x, self.targets[index])

    def _own_tokens(self, sample: Mapping[str, torch.Tensor]) -> torch.Tensor:
        by_kind = {kind: sample[n] for n, kind in self.preparation.settings["fields"].items()}
        ids = by_kind["ids"]
        counts = by_kind.get("attention_mask", ids != self.preparation.settings["pad_id"])
        return ids.where(counts.bool(), IGNORED_LABEL)

    @cached_property
    def _read(self) -> Any:
        settings, inputs = self.preparation.settings, self.preparation.inputs
        if self.preparation.form != "text":
            reader = audio_reader if self.preparation.form == "audio" else image_reader
            return reader(settings, inputs[0])
        from tokenizers import Tokenizer

        return text_reader(settings, inputs, Tokenizer.from_str(self.preparation.tokenizer))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_read"}


class Rows(TensorDataset):
    """Numbers in memory, as tensors."""

    class_names: tuple[str, ...] = ()


def with_class_names(spec: FileData, folder: Path) -> FileData:
    """Return a section with the labels that its file of `classes` holds, a label a line.

    Raises PipelineInvalid where the file cannot be read, is empty, or has a label twice.
    """
    if not isinstance(spec.classes, str):
        return spec
    try:
        # Editors of Windows begin a file with a mark that is no part of the first name.
        lines = (folder / spec.classes).read_text("utf-8-sig").splitlines()
        names = tuple(filter(None, map(str.strip, lines)))
        refuse_repeated("label", names)
    except (OSError, ValueError) as error:
        raise PipelineInvalid(f"classes: {spec.classes}: {error}") from error
    if not names:
        raise PipelineInvalid(f"classes: {spec.classes} is empty, expected a label a line")
    return spec.model_copy(update={"classes": names})


def load_files(files: Files) -> dict[str, Dataset[Any]]:
    """Return the splits that files hold, prepared and with labels as the model's classes.

    Raises PipelineInvalid where files, labels or columns are not as the settings say.
    """
    parts = read_records(files.spec, files.folder)
    known = files.spec.classes or files.preparation.class_names
    targets, class_names = targets_of(parts, known, files.has_numbers)
    splits: dict[str, Dataset[Any]] = {}
    for name, records in parts.items():
        dataset: Any = _dataset(files, records, targets[name])
        dataset.class_names = class_names
        splits[name] = dataset
    return splits


def _dataset(files: Files, records: Records, targets: Any) -> Dataset[Any]:
    form, columns = files.preparation.form, records.columns
    if form:
        if len(columns) > 1:
            raise PipelineInvalid(
                f"{files.spec.place} has {', '.join(columns)}, expected one array of images"
            )
        raw = next(iter(columns.values()))
        return RawSamples(raw, targets, files.preparation, files.continues_texts)
    tensors: Any = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in columns.items()}
    tensors = {n: x.float() if x.dtype == torch.float64 else x for n, x in tensors.items()}
    if isinstance(files.spec, TableData):
        tensors = {"input": torch.stack([*tensors.values()], dim=1)}
    labels: dict[str, Any] = {} if targets is None else {LABELS: targets}
    if len(tensors) > 1:  # the model takes them by their names
        return stack_columns(tensors | labels)
    return Rows(*tensors.values(), *labels.values())


def targets_of(
    parts: Parts, known: Sequence[str] = (), as_floats: bool = False
) -> tuple[dict[str, torch.Tensor | None], tuple[str, ...]]:
    """Return the labels of each split as numbers, and the names of the classes.

    Texts become classes, in the order of the `known` names if there are any, else sorted; so do
    whole numbers that are among these names. Others stay the numbers that they are, floats with
    `as_floats`.
    """
    labelled = {name: records for name, records in parts.items() if records.labels is not None}
    targets: dict[str, torch.Tensor | None] = dict.fromkeys(parts)
    names = next((r.names for r in labelled.values() if r.names), ())
    columns = _as_numbers({name: records.labels for name, records in labelled.items()})
    if not labelled:
        return targets, tuple(known)
    kinds = {column.dtype.kind for column in columns.values()}
    is_vector = any(column.ndim > 1 for column in columns.values())
    # Whole prices in one split are prices, too.
    if as_floats or is_vector or ("f" in kinds and kinds <= set("fiu")):
        if words := [c for c in columns.values() if c.dtype.kind not in "fiub"]:
            raise PipelineInvalid(f"labels: found {str(words[0].flat[0])!r}, expected numbers")
        if not is_vector and not all(np.isfinite(x.astype(float)).all() for x in columns.values()):
            raise PipelineInvalid("labels: found nan or inf, expected numbers")
        return targets | {n: torch.from_numpy(x.astype(np.float32)) for n, x in columns.items()}, ()
    if names:  # numbers that stand for names
        if any((x < 0).any() for x in columns.values()):
            raise PipelineInvalid("labels: some are -1, which names no class")
        columns = {n: np.asarray(names)[x] for n, x in columns.items()}
    every = {label for column in columns.values() for label in column.tolist()}
    texts = {str(label) for label in every}
    if all(isinstance(label, int) for label in every) and not (known and texts <= set(known)):
        if min(every) < 0:
            raise PipelineInvalid(f"labels: found {min(every)}, expected classes from 0 on")
        numbers = {n: torch.from_numpy(x.astype(np.int64)) for n, x in columns.items()}
        return targets | numbers, tuple(known)
    order = tuple(known) or names or tuple(sorted(texts))
    if others := sorted(texts - set(order)):
        found, expected = (", ".join(map(repr, x[:MOST_SHOWN])) for x in (others, order))
        more = ", …" if len(order) > MOST_SHOWN else ""
        raise PipelineInvalid(
            f"labels: found {found}, and the model's classes are {expected}{more}; name them so, "
            "or give the labels in the order of the classes as `classes:`"
        )
    number = {name: i for i, name in enumerate(order)}
    for split, column in columns.items():
        targets[split] = torch.tensor([number[str(label)] for label in column.tolist()])
    return targets, order


def _as_numbers(labels: Mapping[str, Any]) -> dict[str, Any]:
    """Return each split's labels, with the texts of text files as numbers if all are numbers."""

    def converted(column: Any, kind: type) -> Any:
        return np.asarray([kind(x) if isinstance(x, str) else x for x in column])

    if any(isinstance(x, str) for column in labels.values() for x in column):
        for kind in (int, float):
            with suppress(ValueError):
                return {name: converted(column, kind) for name, column in labels.items()}
    return {name: np.asarray(column) for name, column in labels.items()}
