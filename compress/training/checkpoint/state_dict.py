"""Reading of a checkpoint's tensors, which have the names of the weights.

The names do not depend on how the model is sharded: a checkpoint of many processes can be loaded by
one, and the other way round.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from compress.common.errors import StageFailed, first_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


STATE = "state."


@contextmanager
def no_group_expected() -> Iterator[None]:
    """Ignore torch's warnings that checkpoints are of one process, which is intended, in a block.

    Not around each call: the warnings come from threads too.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def read_(checkpoint: Path, state: dict[str, Any]) -> set[str]:
    """Read tensors from a checkpoint, in place, and return the names of those that it lacks."""
    # torch's index file is a pickle: only this training's own processes write to its folder, and
    # its hash was verified.
    with one_line_errors(f"checkpoint {checkpoint} cannot be read"):
        reader = FileSystemReader(checkpoint)
        saved = reader.read_metadata().state_dict_metadata
        known = {
            part: {name: t for name, t in tensors.items() if f"{part}.{name}" in saved}
            for part, tensors in state.items()
        }
        load(known, storage_reader=reader, no_dist=not torch.distributed.is_initialized())
    return {name for part in state for name in state[part] if name not in known[part]}


@contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Convert errors of torch.distributed.checkpoint into one line; they are BaseExceptions."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        message = f"{type(cause).__name__}: {first_line(cause)}"
        raise StageFailed(f"{what} (process {rank}: {message})") from error
