"""Reads float32 weights of ZeRO checkpoints, as deepspeed/utils/zero_to_fp32.py (0.19) does.

Each process saved its part of the flattened weights with its optimizer's state, and names and
shapes beside them.
"""

from __future__ import annotations

import re
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from compress.checkpoint.state_dict import StoredTensor
from compress.checkpoint.torch_pickle import read_pickle
from compress.common.atomic_files import file_beside, open_regular
from compress.common.errors import ArtifactInvalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from compress.checkpoint.state_dict import Weights

LATEST = "latest"
MODEL_FILES = "*_model_states.pt"
OPTIMIZER_FILES = "*_optim_states.pt"
MODEL_PARALLEL = ("*mp_rank_01_*", "layer_*-model_states.pt", "*expert_*")
"""Files of tensor parallelism, of pipeline parallelism and of a mixture of experts."""


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
    if any(next(folder.glob(pattern), None) for pattern in MODEL_PARALLEL):
        raise ArtifactInvalid(
            f"checkpoint {folder}: of a model that DeepSpeed split (tensor, pipeline or expert "
            "parallelism), which is not put together here; load it with DeepSpeed and save "
            "model.state_dict(), or convert it with deepspeed.checkpoint.ds_to_universal"
        )
    models = [read_pickle(file) for file in _by_rank(folder.glob(MODEL_FILES))]
    states = [read_pickle(file) for file in _by_rank(folder.glob(OPTIMIZER_FILES))]
    try:
        return _put_together(models, [state["optimizer_state_dict"] for state in states])
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ArtifactInvalid(
            f"checkpoint {folder}: is not laid out as DeepSpeed's ZeRO stages are, or a process's "
            f"file is missing ({type(error).__name__}: {error}); run "
            f"python zero_to_fp32.py {folder.parent} OUT, which DeepSpeed saved there, and name OUT"
        ) from error


def _put_together(models: list[dict[str, Any]], states: list[dict[str, Any]]) -> Weights:
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


def _stages_1_and_2(
    model: dict[str, Any], states: list[dict[str, Any]]
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield each weight; a group's weights follow one another over the parts of all ranks."""
    paddings = states[0].get("param_alignment_paddings")
    for number, shapes in enumerate(model["param_shapes"]):
        parts = [state["single_partition_of_fp32_groups"][number] for state in states]
        start = 0
        for index, (name, shape) in enumerate(shapes.items()):
            yield name, _stored(_section(parts, start, prod(shape)), shape)
            start += prod(shape) + (paddings[number][index] if paddings else 0)


def _stage_3(
    model: dict[str, Any], states: list[dict[str, Any]]
) -> Iterator[tuple[str, StoredTensor]]:
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
    joined = parts or [torch.empty(0)]  # of a weight without entries
    return StoredTensor(
        tuple(shape), joined[0].dtype, lambda: torch.cat(joined)[:size].view(*shape)
    )


def _by_rank(files: Iterator[Path]) -> list[Path]:
    """Sort by the numbers in the names: rank 10 follows rank 9; refuse links to elsewhere."""
    checked = (file_beside(file, file.name) for file in files)
    return sorted(checked, key=lambda f: [int(n) for n in re.findall(r"\d+", f.name)])
