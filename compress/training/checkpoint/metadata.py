"""How far a training is, and its checkpoints on disk, of which only whole ones are taken up.

A checkpoint is a directory `step-…` with the tensors as torch.distributed.checkpoint writes them,
each process its own part, `progress.json`, and `files.json` with every file's SHA-256, which holds
one of its own too. It is made under another name and renamed when it is whole.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from compress.common.atomic_files import sha256_of, sync, write_atomically
from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid, StageFailed
from compress.common.strict_json import dump_sealed, load_sealed
from compress.training.loop.loss_meter import Losses

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
PROGRESS = "progress.json"
FILES = "files.json"
PARTIAL = ".partial"
DAMAGED = ".damaged"

NO_LOSSES: Losses = ("0", 0, ())

Tensors = dict[str, "torch.Tensor"]


class Epoch(Settings):
    """What one epoch came to."""

    epoch: int
    """Counted from 1; 0 is the model as it came in."""
    loss: float | None
    """Mean of the objective over the epoch's steps; None for epoch 0."""
    constant_loss: bool = False
    """Whether the loss was the same in every step, or 0: nothing can be learnt from it."""
    metric: float | None
    """The metric on `val` after the epoch; None without a `val` split."""
    learning_rate: float | None
    """Learning rate of the epoch's last step; None for epoch 0."""
    sent_bytes: int | None = None
    """Gradients that each process sends in a step; None where there is one process."""
    sent_between_bytes: int | None = None
    """Those of them that go to another group of `hierarchical`; None where there are no groups."""


class Progress(Settings):
    """How far a training is; all processes have the same."""

    history: tuple[Epoch, ...] = ()
    """The finished epochs, epoch 0 among them where the model as it came in competes."""
    steps: int = 0
    """Steps taken in the epoch that is not finished."""
    losses: Losses = NO_LOSSES
    """The losses of these steps over all processes."""
    kept: Epoch | None = None
    """The epoch whose weights are kept so far."""
    kept_in: str | None = None
    """The checkpoint that holds them; None where they are the weights that came in."""
    scaler: dict[str, Any] = {}
    """State of the loss scaler of `fp16`; empty with the others."""
    layouts: tuple[str, ...] = ()
    """How the training was spread over processes, and how differently after interruptions."""

    @property
    def trained_epochs(self) -> int:
        """Number of epochs trained."""
        return sum(1 for epoch in self.history if epoch.epoch > 0)


def read_progress(checkpoint: Path) -> Progress:
    """Return how far the training was when a checkpoint was written."""
    return Progress.model_validate_json((checkpoint / PROGRESS).read_bytes())


def newest(folder: Path, trusted: str | None = None) -> Path | None:
    """Return the newest whole checkpoint; damaged ones are put aside with a warning.

    Args:
        folder: the training's folder.
        trusted: name of a checkpoint that was found whole a moment ago.
    """
    for checkpoint in reversed(checkpoints(folder)):
        damage = None if checkpoint.name == trusted else _damage(checkpoint)
        if damage is None:
            return checkpoint
        aside = checkpoint.with_name(checkpoint.name + DAMAGED)
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.replace(aside)
        log.warning("checkpoint %s is damaged (%s); the one before it is used", aside, damage)
    return None


def need_whole(checkpoint: Path) -> None:
    """Refuse a damaged checkpoint.

    Raises:
        StageFailed: it is damaged.
    """
    damage = _damage(checkpoint)
    if damage:
        raise StageFailed(
            f"checkpoint {checkpoint}, which holds the weights to keep, is damaged ({damage}); "
            f"remove {checkpoint.parent} to train anew"
        )


def checkpoints(folder: Path) -> list[Path]:
    """Return the finished checkpoints of a training, the oldest first."""
    found = (folder / FOLDER).glob("step-*")
    return sorted(c for c in found if c.suffix not in (PARTIAL, DAMAGED))


def begin(folder: Path, step: int) -> Path:
    """Return the directory in which the checkpoint of a step is made; every process calls this."""
    partial = folder / FOLDER / f"{name_of(step)}{PARTIAL}"
    partial.mkdir(parents=True, exist_ok=True)
    return partial


def commit(partial: Path, progress: Progress) -> Path:
    """Make a checkpoint valid, now that every process has written its part."""
    write_atomically(partial / PROGRESS, progress.model_dump_json())
    files = {
        file.relative_to(partial).as_posix(): sha256_of(file)
        for file in sorted(partial.rglob("*"))
        if file.is_file()
    }
    training = partial.parent.parent.name
    content = {"training": training, "checkpoint": partial.stem, "files": files}
    write_atomically(partial / FILES, dump_sealed(content))
    whole = partial.with_suffix("")
    shutil.rmtree(whole, ignore_errors=True)
    partial.replace(whole)
    sync(whole.parent)
    return whole


def remove_unfinished(folder: Path) -> None:
    """Remove what an interruption left of checkpoints that were being written."""
    _remove((folder / FOLDER).glob(f"step-*{PARTIAL}"))


def rotate(folder: Path, keep: int) -> None:
    """Remove all but the newest checkpoints and those whose weights one of them keeps."""
    found = checkpoints(folder)
    needed = {read_progress(checkpoint).kept_in for checkpoint in found[-keep:]}
    _remove(checkpoint for checkpoint in found[:-keep] if checkpoint.name not in needed)


def name_of(step: int) -> str:
    """Return the name of the checkpoint after a step, counted over the whole training."""
    return f"step-{step:012d}"


def _remove(found: Iterable[Path]) -> None:
    for checkpoint in list(found):
        shutil.rmtree(checkpoint)


def _damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint."""
    try:
        content = load_sealed((checkpoint / FILES).read_bytes())
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
        return f"{FILES} {error}"
    except (OSError, ValueError, KeyError, AttributeError, ValidationError) as error:
        return f"{type(error).__name__}: {error}"
    return None
