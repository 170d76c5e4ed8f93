"""Writes the `data:` section for files that a user names, as `compress init` proposes it."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from statistics import mode
from typing import Any

from pydantic import TypeAdapter

from compress.common.errors import PipelineInvalid
from compress.common.requirements import require_all
from compress.pipelines.config.data_spec import PARQUET, DataSpec, FileData
from compress.pipelines.data.records import (
    IMAGE_SUFFIXES,
    LABELS,
    SOUND_SUFFIXES,
    SPLITS,
    WHOLE,
    files_below,
    read_parts,
    rows_of,
)
from compress.serve.packaging.request_forms import AudioInput

TABLES = (".csv", ".tsv", ".json", ".jsonl", ".ndjson", *PARQUET)
ARRAYS = (".npz", ".npy")
LABEL_COLUMNS = (*LABELS, "class", "category", "sentiment", "stars", "rating", "score")
SPLIT = {"val": 0.2, "test": 0.1}  # proposed where files are not divided
ROWS_READ = 100  # of a table, to tell texts from numbers; files of sounds


def describe_files(path: Path) -> dict[str, Any]:
    """Return the section for a file or folder; PipelineInvalid where that is no known form."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    named = [file for file in files if path.is_file() or SPLITS.get(file.stem.lower())]
    if any((path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json")):
        content = {"huggingface": str(path), **_columns_of_folder(path)}
    elif tables := [file for file in named if file.suffix.lower() in TABLES]:
        content = {"table": str(path), **_columns_of_table(tables[0])}
    elif any(file.suffix.lower() in ARRAYS for file in named):
        content = {"arrays": str(path)}
    elif path.is_dir():
        files = sorted(files_below(path))
        sounds = [file for file in files if file.suffix.lower() in SOUND_SUFFIXES]
        if any(file.suffix.lower() in IMAGE_SUFFIXES for file in files) or not sounds:
            content = {"images": str(path)}
        else:
            rate = mode(map(_rate_of, sounds[:ROWS_READ]))
            content = {"audio": str(path), "prepare": {"rate": rate}}
    else:
        raise PipelineInvalid(
            f"{path}: expected a folder of images or sounds, a .csv, .tsv, .jsonl, .parquet, .npz "
            "or .npy file, or a folder of Hugging Face's datasets"
        )
    spec: Any = TypeAdapter(DataSpec).validate_python(content)
    assert isinstance(spec, FileData)
    parts = read_parts(spec, Path())
    # Stars from 1 to 5 are classes from 0 to 4.
    numbered = [p.labels for p in parts.values() if p.labels is not None and not p.names]
    labels = {str(label) for column in numbered for label in column}
    if len(labels) > 1 and labels == {str(i + 1) for i in range(len(labels))}:
        content["classes"] = sorted(labels, key=int)
    return {**content, "split": SPLIT} if WHOLE in parts else content


def _rate_of(sound: Path) -> int:
    require_all(AudioInput.requirements, sound.name)
    import soundfile

    try:
        return int(soundfile.info(sound).samplerate)
    except soundfile.SoundFileError:
        raise PipelineInvalid(f"{sound} is no WAV or FLAC file, or truncated") from None


def _columns_of_table(file: Path) -> dict[str, Any]:
    rows = list(islice(rows_of(file), ROWS_READ))
    if not rows:
        raise PipelineInvalid(f"{file.name} has no rows")
    return _chosen({name: [row.get(name) for row in rows] for name in rows[0]})


def _columns_of_folder(folder: Path) -> dict[str, Any]:
    info = next(folder.rglob("dataset_info.json"))
    features: dict[str, Any] = json.loads(info.read_text(encoding="utf-8")).get("features", {})
    images = [name for name, kind in features.items() if kind.get("_type") == "Image"]
    label = next((name for name in LABEL_COLUMNS if name in features), None)
    found = {"label": label} if label else {}
    if images:
        return {"image": images[0], **found}
    texts = {name: ["text"] for name, kind in features.items() if kind.get("dtype") == "string"}
    chosen = _chosen({name: texts.get(name, [0.0]) for name in features})
    if "text" not in chosen:
        chosen["columns"] = [name for name in features if name != (label or chosen["label"])]
    return chosen | found


def _chosen(columns: dict[str, list[Any]]) -> dict[str, Any]:
    """Return which column is the text, if one is, and which the label, if another is left."""
    lower, last = {name.lower(): name for name in columns}, [*columns][-1]
    label = next((lower[name] for name in LABEL_COLUMNS if name in lower), last)
    if len(columns) == 1 and not all(map(_is_number, columns[last])):
        return {"text": last}
    texts = {n: c for n, c in columns.items() if n != label and not all(map(_is_number, c))}
    if not texts:
        return {"label": label}
    # The longest ones: others are names and dates.
    longest = max(texts, key=lambda name: sum(len(str(text)) for text in texts[name]))
    return {"text": longest, "label": label}


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
