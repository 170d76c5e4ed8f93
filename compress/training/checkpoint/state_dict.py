"""Tensors of a model and its optimizer in a checkpoint, under the weights' own names.

The names do not depend on how the model is sharded: a checkpoint of many processes can be loaded by
one, and the other way round. An optimizer's options are not saved: they follow from the settings.
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load

from compress.common.errors import StageFailed, first_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn

    from compress.training.checkpoint.metadata import Tensors

BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
STATE = "state."

# torch warns when a checkpoint is written or read without a process group, which is intended in a
# single process. A global filter, because the warnings come from threads too.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def model_tensors(module: nn.Module) -> Tensors:
    """Return the module's weights and buffers, or this process's shards of them."""
    return cast("Tensors", get_model_state_dict(module))


def optimizer_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the optimizer's tensors by name: `state.<weight>.<entry>`."""
    flat: dict[str, Any] = get_optimizer_state_dict(module, optimizer, options=BY_NAME)
    return {
        name: value
        for name, value in flat.items()
        if name.startswith(STATE) and isinstance(value, torch.Tensor)
    }


def read_(checkpoint: Path, state: dict[str, Any]) -> set[str]:
    """Read tensors from a checkpoint, in place, and return the names of those that it lacks.

    Raises:
        StageFailed: it cannot be read, or has other shapes.
    """
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


def load_model_(module: nn.Module, tensors: Tensors) -> None:
    """Load weights and buffers into the module, in place."""
    set_model_state_dict(module, dict(tensors))


def load_optimizer_(module: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Load the optimizer's state from a checkpoint, in place.

    Raises:
        StageFailed: it cannot be read, or there is none.
    """
    state = get_optimizer_state_dict(module, optimizer, options=BY_NAME)
    tensors = {name: state[name] for name in optimizer_tensors(module, optimizer)}
    absent = read_(checkpoint, {"optimizer": tensors})
    set_optimizer_state_dict(module, optimizer, {**state, **tensors}, options=BY_NAME)
    # A weight without a gradient so far has no state; get_optimizer_state_dict has created some.
    names = {name.removeprefix(STATE).rpartition(".")[0] for name in absent}
    for name, weight in module.named_parameters():
        if name in names:
            optimizer.state.pop(weight, None)


@contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Convert errors of torch.distributed.checkpoint into one line; they are BaseExceptions."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        message = f"{type(cause).__name__}: {first_line(cause)}"
        raise StageFailed(f"{what} (process {rank}: {message})") from error
