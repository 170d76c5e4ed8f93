"""Training progress, and checkpoint directories that are complete or not read at all.

A checkpoint is a directory `step-…` with the tensors as torch.distributed.checkpoint writes them,
each process its own part, `progress.json`, and `files.json` with the SHA-256 of every file and of
itself.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import ValidationError

from compress.common.atomic_files import sha256_of, sync, write_atomically
from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid, StageFailed
from compress.common.sealed_json import read_sealed, write_sealed

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
PROGRESS = "progress.json"
FILES = "files.json"
PARTIAL = ".partial"
DAMAGED = ".damaged"

LossSum: TypeAlias = tuple[str, int, tuple[float, ...]]
"""Exact sum of losses as a fraction; their count; up to two distinct values among them."""

NO_LOSSES: LossSum = ("0", 0, ())

Tensors: TypeAlias = "dict[str, torch.Tensor]"


class Epoch(Settings):
    """Results of one epoch."""

    epoch: int
    """Counted from 1; 0 is the input model."""
    loss: float | None
    """Mean of the objective over the epoch's steps; None for epoch 0."""
    constant_loss: bool = False
    """Whether the loss was the same in every step, or 0: nothing can be learnt from it."""
    metric: float | None
    """The metric on `val` after the epoch; None without a `val` split."""
    learning_rate: float | None
    """Learning rate of the epoch's last step; None for epoch 0."""
    sent_bytes: int | None = None
    """Bytes of gradients, and with `zero1` and `fsdp` of weights, that each process sends in a
    step; None for a single process, and with `tensor`, `pipeline` and `deepspeed`."""
    sent_between_bytes: int | None = None
    """Bytes of them that leave the process's group of `hierarchical`; None without groups."""


class TrainProgress(Settings):
    """How far a training is; the same in all processes."""

    history: tuple[Epoch, ...] = ()
    """The finished epochs, with epoch 0 if the input model competes with them."""
    steps: int = 0
    """Steps taken in the unfinished epoch."""
    losses: LossSum = NO_LOSSES
    """The losses of these steps over all processes."""
    kept: Epoch | None = None
    """The epoch whose weights are the result so far."""
    kept_in: str | None = None
    """Name of the checkpoint with these weights; None for those of the input model."""
    scaler: dict[str, Any] = {}
    """State of the loss scaler of `fp16`; empty at other precisions."""
    layouts: tuple[str, ...] = ()
    """Layout of the processes (`Parallel.layout`), and each other one after a resumption."""

    @property
    def trained_epochs(self) -> int:
        """Number of epochs trained."""
        return sum(1 for epoch in self.history if epoch.epoch > 0)


def read_progress(checkpoint: Path) -> TrainProgress:
    """Read the progress recorded in a checkpoint."""
    return TrainProgress.model_validate_json((checkpoint / PROGRESS).read_bytes())


def newest_intact(folder: Path, trusted: str | None = None) -> Path | None:
    """Find the newest intact checkpoint; damaged ones are renamed, with a warning."""
    # The hashes of the one named `trusted` were just verified, and are not computed again.
    for checkpoint in reversed(checkpoints(folder)):
        damage = None if checkpoint.name == trusted else _damage(checkpoint)
        if damage is None:
            return checkpoint
        aside = checkpoint.with_name(checkpoint.name + DAMAGED)
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.replace(aside)
        log.warning("checkpoint %s is damaged (%s); the one before it is used", aside, damage)
    return None


def require_intact(checkpoint: Path) -> None:
    """Refuse a damaged checkpoint."""
    damage = _damage(checkpoint)
    if damage:
        raise StageFailed(
            f"checkpoint {checkpoint}, which holds the weights to keep, is damaged ({damage}); "
            f"remove {checkpoint.parent} to train anew"
        )


def checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints of a training, the oldest first."""
    folders = (folder / FOLDER).glob("step-*")
    return sorted(c for c in folders if c.suffix not in (PARTIAL, DAMAGED))


def create_partial(folder: Path, step: int) -> Path:
    """Create the temporary directory for the checkpoint of a step; every process calls this."""
    partial = folder / FOLDER / f"{checkpoint_name(step)}{PARTIAL}"
    partial.mkdir(parents=True, exist_ok=True)
    return partial


def commit(partial: Path, progress: TrainProgress) -> Path:
    """Hash and rename a checkpoint after every process has written its part."""
    write_atomically(partial / PROGRESS, progress.model_dump_json())
    # Hashes and rename come last, so that a crash leaves either a valid checkpoint or none.
    files = {
        file.relative_to(partial).as_posix(): sha256_of(file)
        for file in sorted(partial.rglob("*"))
        if file.is_file()
    }
    training = partial.parent.parent.name
    content = {"training": training, "checkpoint": partial.stem, "files": files}
    write_sealed(partial / FILES, content)
    complete = partial.with_suffix("")
    shutil.rmtree(complete, ignore_errors=True)
    partial.replace(complete)
    sync(complete.parent)  # or the rename itself may be lost with the power
    return complete


def remove_unfinished(folder: Path) -> None:
    """Remove checkpoints that an interruption left incomplete."""
    for partial in list((folder / FOLDER).glob(f"step-*{PARTIAL}")):
        shutil.rmtree(partial)


def rotate(folder: Path, keep: int) -> None:
    """Remove all checkpoints but the newest and those with the best weights that these name."""
    every = checkpoints(folder)
    needed = {read_progress(checkpoint).kept_in for checkpoint in every[-keep:]}
    for checkpoint in every[:-keep]:
        if checkpoint.name not in needed:
            shutil.rmtree(checkpoint)


def checkpoint_name(step: int) -> str:
    """Return the directory name of the checkpoint after a step, counted over all epochs."""
    return f"step-{step:012d}"


def _damage(checkpoint: Path) -> str | None:
    """Describe what is wrong with a checkpoint; None if nothing is."""
    try:
        content = read_sealed(checkpoint / FILES, dict[str, Any])
        training = checkpoint.parent.parent.name
        if (content["training"], content["checkpoint"]) != (training, checkpoint.name):
            return "it is of another training or step"
        for name, digest in content["files"].items():
            if sha256_of(checkpoint / name) != digest:
                return f"{name} is not what was written"
        read_progress(checkpoint)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except ArtifactInvalid as error:
        return str(error)
    except (OSError, ValueError, KeyError, AttributeError, ValidationError) as error:
        return f"{type(error).__name__}: {error}"
    return None
