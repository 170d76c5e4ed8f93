"""Which blocks a model can do without: those that may leave, and a search among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from compress.artifacts.edits.block_removal import alike_entries, keep_blocks_
from compress.common.errors import StageFailed, first_line
from compress.common.forward import run_in_eval
from compress.pruning.verification.masked_equivalence import shallow_copy, shapes_in_training

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from torch import nn

    from compress.core.progress import Progress
    from compress.pruning.depth.output_error import OutputError, OutputErrorMeter

Shapes = tuple[tuple[int, ...] | None, tuple[int, ...] | None]
"""Of the first tensor that goes in, and of the first that comes out."""


@dataclass(frozen=True)
class Block:
    """A block by its place."""

    container: str
    index: int
    name: str


@dataclass(frozen=True)
class Removal:
    """The blocks that a search took out, and what it learnt about the others."""

    steps: tuple[tuple[Block, OutputError], ...]
    """Each block in the order of removal, and the harm with all until it gone."""
    alone: Mapping[Block, OutputError]
    """The harm of each block's removal alone."""
    refused: Mapping[str, str]
    """Block that cannot be removed → why."""


def all_blocks(module: nn.Module) -> list[Block]:
    """Return the alike blocks of all lists and sequences, the outer ones first."""
    found = []
    for container, part in module.named_modules():
        keys = list(part._modules)
        for index in alike_entries(part):
            name = f"{container}.{keys[index]}".lstrip(".")
            found.append(Block(container, index, name))
    return found


def reasons_to_stay(
    module: nn.Module, inputs: Sequence[torch.Tensor], blocks: Iterable[Block]
) -> dict[str, str]:
    """Return blocks that cannot be left out → why: their output does not fit in for their input."""
    shapes = _shapes_of_calls(module, inputs, blocks)
    reasons = {}
    for name, calls in shapes.items():
        odd = next((call for call in calls if call[0] != call[1] or None in call), None)
        if not calls:
            reasons[name] = "it is not called"
        elif odd:
            reasons[name] = f"its input has shape {odd[0]} and its output {odd[1]}"
    return reasons


def kept_without(module: nn.Module, removed: Collection[Block]) -> dict[str, tuple[int, ...]]:
    """Return what stays in each container that loses blocks: its entries' indices."""
    kept = {}
    for container in dict.fromkeys(block.container for block in removed):
        leaving = {block.index for block in removed if block.container == container}
        count = len(module.get_submodule(container)._modules)
        kept[container] = tuple(i for i in range(count) if i not in leaving)
    return kept


def search(
    module: nn.Module,
    blocks: Sequence[Block],
    count: int,
    judge: OutputErrorMeter,
    refused: Mapping[str, str],
    progress: Progress,
) -> Removal:
    """Return the removal of so many blocks, each time the one that then does the least harm.

    Greedy, because which blocks can go depends on which are gone: the best pair is seldom made of
    the two that do the least harm alone.

    Args:
        module: the module; it is not changed.
        blocks: those that may leave.
        count: how many are to leave.
        judge: measures harm.
        refused: blocks that stay, and why; more may be found.
        progress: told of each trial.

    Raises:
        StageFailed: fewer can leave.
    """
    refused = dict(refused)
    alone: dict[Block, OutputError] = {}
    steps: list[tuple[Block, OutputError]] = []
    total = sum(max(0, len(blocks) - done) for done in range(count))
    tried = 0
    while len(steps) < count:
        gone = [block for block, _ in steps]
        harms: dict[Block, OutputError] = {}
        for block in _next(module, blocks, gone):
            tried += 1
            progress("remove blocks", min(tried, total), total, f"{len(steps)} of {count} removed")
            found = _try(module, [*gone, block], judge)
            if isinstance(found, str):
                refused.setdefault(block.name, found)
            else:
                harms[block] = found
        alone = alone or harms
        best = _least_harmful(module, gone, harms, judge, refused)
        if best is None:
            raise StageFailed(_too_few(len(steps), count, refused))
        steps.append((best, harms[best]))
        blocks = [block for block in blocks if block in harms and block.name not in refused]
    if tried < total:  # some could not be tried, which nobody knew before
        progress("remove blocks", total, total)
    return Removal(tuple(steps), alone, refused)


def _next(module: nn.Module, blocks: Sequence[Block], gone: Sequence[Block]) -> list[Block]:
    """Return the blocks that may leave next: within none that left, and not a list's last one."""
    kept = kept_without(module, gone)
    return [
        block
        for block in blocks
        if block not in gone
        and not any(f"{block.name}.".startswith(f"{other.name}.") for other in gone)
        and len(kept.get(block.container, (0, 1))) > 1
    ]


def _try(module: nn.Module, removed: Sequence[Block], judge: OutputErrorMeter) -> OutputError | str:
    """Return the harm of removing blocks, or why it cannot be done."""
    trial = shallow_copy(module)
    try:
        keep_blocks_(trial, kept_without(module, removed))
        return judge.harm(trial)
    except StageFailed as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - a forward may fail in any way
        return f"the model without it fails: {type(error).__name__}: {first_line(error)}"


def _least_harmful(
    module: nn.Module,
    gone: Sequence[Block],
    harms: Mapping[Block, OutputError],
    judge: OutputErrorMeter,
    refused: dict[str, str],
) -> Block | None:
    """Return the block that is missed least, of those without which the model can be trained.

    Others that are missed less are added to the refused ones.
    """
    for block in sorted(harms, key=lambda block: harms[block].order):
        reason = _untrainable(module, [*gone, block], judge)
        if reason is None:
            return block
        refused[block.name] = reason
    return None


def _untrainable(
    module: nn.Module, removed: Sequence[Block], judge: OutputErrorMeter
) -> str | None:
    """Return why the model without some blocks cannot run in training mode, where the whole can."""
    inputs = tuple(x.to(judge.context.device) for x in judge.batches[0].inputs)
    try:
        expected = shapes_in_training(module, inputs)
    except Exception:  # noqa: BLE001 - a forward may fail in any way
        return None
    trial = shallow_copy(module)
    try:
        keep_blocks_(trial, kept_without(module, removed))
        found = shapes_in_training(trial, inputs)
    except Exception as error:  # noqa: BLE001 - a forward may fail in any way
        return (
            f"the model without it fails in training: {type(error).__name__}: {first_line(error)}"
        )
    return None if found == expected else "the outputs of the model without it differ in training"


def _too_few(found: int, wanted: int, refused: Mapping[str, str]) -> str:
    shown = [f"{name}: {reason}" for name, reason in list(refused.items())[:3]]
    more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
    why = f" ({'; '.join(shown)}{more})" if shown else ", because each list keeps one block"
    return f"{wanted} blocks are to be removed and {found} can be{why}"


def _shapes_of_calls(
    module: nn.Module, inputs: Sequence[torch.Tensor], blocks: Iterable[Block]
) -> dict[str, list[Shapes]]:
    """Return the shapes that go in and out of each block in each of its calls."""
    shapes: dict[str, list[Shapes]] = {}
    handles = []

    def watch(name: str, block: nn.Module) -> None:
        def note(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            shapes[name].append((_first_shape((args, kwargs)), _first_shape(output)))

        shapes[name] = []
        handles.append(block.register_forward_hook(note, with_kwargs=True))

    for block in blocks:
        watch(block.name, module.get_submodule(block.name))
    try:
        run_in_eval(module, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return shapes


def _first_shape(value: Any) -> tuple[int, ...] | None:
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return next((tuple(tensor.shape) for tensor in tensors), None)
