"""Reads files that torch.save wrote, those of DeepSpeed's ZeRO too; nothing is ever executed."""

from __future__ import annotations

import logging
import pickle
import re
import zipfile
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from compress.checkpoint.file_kinds import SAVED, unreadable
from compress.checkpoint.safe_zip import refuse_bomb
from compress.checkpoint.state_dict import StoredTensor, Weights
from compress.common.atomic_files import file_beside, open_regular
from compress.common.errors import ArtifactInvalid, first_few, raised_as

log = logging.getLogger(__name__)
RUNS_PROGRAMS = re.compile(
    r"(os|posix|nt|sys|subprocess|commands|pty|runpy|importlib|ctypes)\..*"
    r"|builtins\.(eval|exec|compile|open|__import__|breakpoint)"
)
"""Functions that no training stores: never called, but a file that names them is not read."""
NAMES_CODE = re.compile(r"unsupported (global|class)|allowlist", re.IGNORECASE)
"""In torch's (2.13) error for a pickle that names anything but tensors and plain containers."""
ADVICE = "save the weights alone with torch.save(model.state_dict(), …) or as .safetensors"
Content: TypeAlias = dict[str, Any]
LATEST = "latest"
MODEL_FILES = "*_model_states.pt"
OPTIMIZER_FILES = "*_optim_states.pt"
MODEL_PARALLEL = ("*mp_rank_01_*", "layer_*-model_states.pt", "*expert_*")
"""Files of tensor parallelism, of pipeline parallelism and of a mixture of experts."""


class _PlaceholderType(type):
    # torch's reader (2.13) sets items of dict itself only, and compares the types with ==. So the
    # items of a pickled subclass of dict are dropped like any other content of a placeholder.
    def __eq__(cls, other: object) -> bool:
        return cls is other or other is dict

    __hash__ = type.__hash__


class _Placeholder(metaclass=_PlaceholderType):
    """Stands for an object of a class that is not loaded; ignores what the pickle gives it."""

    def __init__(self, *args: object, **keywords: object) -> None: ...
    def __new__(cls, *args: object, **keywords: object) -> _Placeholder:
        return super().__new__(cls)

    def __setstate__(self, state: object) -> None: ...
    def __setitem__(self, key: object, value: object) -> None: ...


def read_pickle(file: Path) -> dict[Any, Any]:
    """Return the dictionary of a file, its tensors mapped into memory and read when they are used.

    Objects of other classes become placeholders: nothing of them is imported or called. Raises
    ArtifactInvalid: the file is unreadable, no dictionary, or names functions that run programs.
    """
    refuse_bomb(file)
    names: list[str] = []
    mapped = False
    try:
        with file.open("rb") as stream:
            is_zip = stream.read(4) == b"PK\3\4"  # else of torch before 1.6
        if is_zip:
            names = sorted(get_unsafe_globals_in_checkpoint(file))
            with zipfile.ZipFile(file) as archive:  # torch would map compressed bytes as tensors
                mapped = all(m.compress_type == zipfile.ZIP_STORED for m in archive.infolist())
        planted = next((name for name in names if RUNS_PROGRAMS.fullmatch(name)), None)
        if planted:
            raise ArtifactInvalid(
                f"checkpoint {file}: names {planted} in pickled code, which is never executed "
                f"here; {ADVICE}"
            )
        placeholders: list[Any] = [(type(name, (_Placeholder,), {}), name) for name in names]
        with safe_globals(placeholders):
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
    except ArtifactInvalid:
        raise
    except Exception as error:  # for bytes that are no pickle, torch's reader raises anything
        # Without torch's advice, which comes first, to load the file with weights_only=False.
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        is_code = isinstance(error, pickle.UnpicklingError) and NAMES_CODE.search(str(error))
        if names or is_code:
            raise ArtifactInvalid(
                f"checkpoint {file}: holds pickled code{_of(names)}, which is never executed here, "
                f"and cannot be read without it ({reason}); {ADVICE}"
            ) from error
        raise unreadable(file, SAVED, f"{type(error).__name__}: {reason}", "checkpoint ") from error
    if not isinstance(state, dict):
        raise ArtifactInvalid(
            f"checkpoint {file}: holds a {type(state).__name__}, expected a state_dict; {ADVICE}"
        )
    if names:
        log.debug("checkpoint %s: objects%s are skipped", file, _of(names))
    return state


def _of(names: list[str]) -> str:
    return f" of {first_few(names)}" if names else ""


def tag_folder(folder: Path) -> Path | None:
    """Return the folder with the files of the newest step; None for anything of others."""
    if next(folder.glob(MODEL_FILES), None) is not None:
        return folder
    if not (folder / LATEST).is_file():
        return None
    with open_regular(folder / LATEST) as stream:
        tag = stream.read(256).decode(errors="replace").strip()
    tagged = file_beside(folder / LATEST, tag)
    if next(tagged.glob(MODEL_FILES), None) is None:
        raise ArtifactInvalid(
            f"checkpoint {folder}: its file {LATEST!r} names {tag!r}, where no {MODEL_FILES} is"
        )
    return tagged


def read_zero(folder: Path) -> Weights:
    """Return weights of ZeRO stages 0 to 3 from all processes' files, or raise ArtifactInvalid."""
    # As deepspeed/utils/zero_to_fp32.py (0.19): each process saved its part of the flattened
    # weights with its optimizer's state, and the names and shapes beside them.
    if any(next(folder.glob(pattern), None) for pattern in MODEL_PARALLEL):
        raise ArtifactInvalid(
            f"checkpoint {folder}: of a model that DeepSpeed split (tensor, pipeline or expert "
            "parallelism), which is not put together here; load it with DeepSpeed and save "
            "model.state_dict(), or convert it with deepspeed.checkpoint.ds_to_universal"
        )
    models = [read_pickle(file) for file in _by_rank(folder.glob(MODEL_FILES))]
    states = [read_pickle(file) for file in _by_rank(folder.glob(OPTIMIZER_FILES))]
    what = "is not laid out as DeepSpeed's ZeRO stages are, or a process's file is missing"
    convert = (
        f"python zero_to_fp32.py {folder.parent} OUT, which DeepSpeed saved there, and name OUT"
    )
    with raised_as(ArtifactInvalid, f"checkpoint {folder}: {what}", f"; run {convert}"):
        return _put_together(models, [state["optimizer_state_dict"] for state in states])


def _put_together(models: list[Content], states: list[Content]) -> Weights:
    model = models[0]
    if not states:  # stage 0: nothing is divided
        return dict(model["module"])
    weights: dict[str, torch.Tensor | StoredTensor] = {
        name: model["module"][name] for name in model["buffer_names"]
    }
    counts = states[0]["partition_count"]
    ranks = max(counts) if isinstance(counts, list) else counts
    if len(states) != ranks:
        raise ValueError(f"{len(states)} of {ranks} files {OPTIMIZER_FILES}")
    is_stage_3 = "fp32_flat_groups" in states[0]
    if is_stage_3 and len(models) != ranks:
        raise ValueError(f"{len(models)} of {ranks} files {MODEL_FILES}")
    frozen = [part.get("frozen_param_fragments") or {} for part in models]
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        weights[name] = _stored([part[name].flatten() for part in frozen], shape)
    weights.update(_stage_3(model, states) if is_stage_3 else _stages_1_and_2(model, states))
    for name, other in model["shared_params"].items():
        if other in weights:
            weights[name] = weights[other]
    return weights


def _stages_1_and_2(model: Content, states: list[Content]) -> Iterator[tuple[str, StoredTensor]]:
    """Yield each weight; a group's weights follow one another over the parts of all ranks."""
    paddings = states[0].get("param_alignment_paddings")
    for number, shapes in enumerate(model["param_shapes"]):
        parts = [state["single_partition_of_fp32_groups"][number] for state in states]
        start = 0
        for index, (name, shape) in enumerate(shapes.items()):
            yield name, _stored(_section(parts, start, prod(shape)), shape)
            start += prod(shape) + (paddings[number][index] if paddings else 0)


def _stage_3(model: Content, states: list[Content]) -> Iterator[tuple[str, StoredTensor]]:
    """Yield each weight, of which every rank has an equal part, the last ones padded."""
    start = 0
    for shapes in model["param_shapes"]:
        for name, shape in shapes.items():
            length = -(-prod(shape) // len(states))
            sections = [_section(s["fp32_flat_groups"], start, length) for s in states]
            yield name, _stored([part for section in sections for part in section], shape)
            start += length


def _section(parts: Sequence[torch.Tensor], start: int, length: int) -> list[torch.Tensor]:
    """Return a range of tensors that follow one another, as views."""
    ends = accumulate(len(part) for part in parts)
    views = []
    for part, end in zip(parts, ends, strict=True):
        begin = end - len(part)
        view = part[max(0, start - begin) : max(0, start + length - begin)]
        if len(view):
            views.append(view)
    return views


def _stored(parts: list[torch.Tensor], shape: Sequence[int]) -> StoredTensor:
    """Return a weight that is copied together when it is read; its padding is left out."""
    size = prod(shape)
    if sum(len(part) for part in parts) < size:
        raise ValueError(f"{sum(len(part) for part in parts)} of {size} entries of a weight")
    views = parts or [torch.empty(0)]  # of a weight without entries
    return StoredTensor(tuple(shape), views[0].dtype, lambda: torch.cat(views)[:size].view(*shape))


def _by_rank(files: Iterator[Path]) -> list[Path]:
    """Sort by the numbers in the names: rank 10 follows rank 9; refuse links to elsewhere."""
    checked = (file_beside(file, file.name) for file in files)
    return sorted(checked, key=lambda f: [int(n) for n in re.findall(r"\d+", f.name)])
