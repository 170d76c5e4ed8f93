"""Search the blocks whose removal changes a model least, by how much worse its outputs become."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch.utils import _pytree as pytree

from compress.artifacts.edits.removal import alike_entries, keep_blocks_
from compress.common.errors import StageFailed, first_line, raise_if_resources_ran_out
from compress.common.forward import (
    Predictor,
    accept_any_batch,
    run_in_eval,
    shallow_copy,
    torch_predictor,
)
from compress.common.tensor_difference import relative_error_of_batches
from compress.core.metrics.builtin import joint_decisions
from compress.data.batch import Batch
from compress.pruning.verification.masked_equivalence import shapes_in_training, training_mismatch

if TYPE_CHECKING:
    from torch import nn

    from compress.common.signature import Signature
    from compress.common.tensor_difference import Pair
    from compress.core.context import Context
    from compress.core.metrics import MetricMeter
    from compress.core.progress import Progress

JudgedBy: TypeAlias = Literal["metric", "outputs"]


@dataclass(frozen=True)
class OutputError:
    """Effect of a change on a model's outputs."""

    distance: float
    """Norm of the difference of the outputs, over the norm of the unchanged outputs."""
    points: float | None = None
    """Drop of the metric in hundredths (percentage points); None without targets."""

    @property
    def order(self) -> tuple[float, float]:
        """Sort key: the metric drop, and among equals the distance of the outputs."""
        return (self.points or 0.0, self.distance)

    def facts(self) -> dict[str, float]:
        """Return the error as rounded facts."""
        points = {} if self.points is None else {"points": round(self.points, 6)}
        return {**points, "distance": float(f"{self.distance:.6g}")}


class OutputErrorMeter:
    """Compares changed modules with the unchanged one on the same samples."""

    def __init__(
        self,
        module: nn.Module,
        signature: Signature,
        context: Context,
        judged_by: JudgedBy | None = None,
        samples: int = 512,
    ) -> None:
        """Run the unchanged module in eval mode; modules are moved to the context's device.

        Errors are judged by the metric if `val` has targets, unless ``judged_by`` says otherwise,
        on at most ``samples`` samples of `val`; without data on a few seeded ones.

        Raises:
            StageFailed: the metric is asked for and cannot be measured.
        """
        self.signature, self.context = signature, context
        metric = context.metric.for_model(signature)
        self.metric = metric.with_inferred_loss(context.data)
        if context.data is not None and "val" in context.data.datasets:
            self.batches = list(context.data.batches("val", limit=samples))
        else:
            self.batches = [Batch(x, None) for x in context.comparison_inputs(signature)]
        # Kept, because every changed module is compared with them.
        self.expected = list(self._outputs(module))
        self.targets = [batch.target for batch in self.batches]
        if self.metric.needs_reference and judged_by != "outputs":
            self.targets = [joint_decisions(outputs, context.task) for outputs in self.expected]
        has_targets = all(target is not None for target in self.targets) and self.metric.is_measured
        if judged_by == "metric" and not has_targets:
            raise StageFailed(
                f"judged_by: metric needs a split 'val' with targets for {self.metric.name}; "
                "bring one, or use judged_by: outputs"
            )
        by_metric = judged_by != "outputs" and has_targets
        self.judged_by: JudgedBy = "metric" if by_metric else "outputs"
        self.base = self._measure(self.expected)[1]

    def measure(self, changed: nn.Module) -> OutputError:
        """Measure the error of a changed module.

        Raises:
            StageFailed: the outputs have another shape, or are NaN or infinite where they were not.
        """
        return self._error(self._outputs(changed))

    def measure_predictor(self, predict: Predictor) -> OutputError:
        """Measure the error of a model in any format, that takes any number of samples."""
        return self._error(self._outputs_read(predict))

    def _error(self, outputs: Iterable[list[torch.Tensor]]) -> OutputError:
        distance, value = self._measure(outputs)
        if value is None or self.base is None:
            return OutputError(distance)
        return OutputError(distance, self.metric.drop_points(self.base, value))

    def _outputs(self, module: nn.Module) -> Iterator[list[torch.Tensor]]:
        device, threads = self.context.device, self.context.threads
        with torch_predictor(module.eval().to(device), device, threads) as predict:
            yield from self._outputs_read(accept_any_batch(predict, self.signature))

    def _outputs_read(self, predict: Predictor) -> Iterator[list[torch.Tensor]]:
        """Yield the outputs that the metric reads, and at least the first."""
        for batch in self.batches:
            read = self.metric.outputs_read(predict(*batch.inputs))
            yield [read] if isinstance(read, torch.Tensor) else list(read)

    def _measure(self, batches: Iterable[list[torch.Tensor]]) -> tuple[float, float | None]:
        """Return the relative error of outputs, and the metric if errors are judged by it."""
        meter = self.metric.meter()
        distance = relative_error_of_batches(self._compared(batches, meter))
        if not math.isfinite(distance):
            raise StageFailed("the outputs are NaN or infinite where they were not")
        if self.judged_by == "outputs":
            return distance, None
        return distance, self.metric.require_finite(meter.compute(), "val")

    def _compared(
        self, batches: Iterable[list[torch.Tensor]], meter: MetricMeter
    ) -> Iterator[Pair]:
        """Yield the unchanged module's first output beside others', and add these to a meter."""
        for (expected, *_), outputs, target in zip(
            self.expected, batches, self.targets, strict=True
        ):
            if outputs[0].shape != expected.shape:
                raise StageFailed(
                    f"the outputs' shape becomes {tuple(outputs[0].shape)}, from "
                    f"{tuple(expected.shape)}"
                )
            yield expected, outputs[0]
            if self.judged_by == "metric" and target is not None:
                meter.update(outputs, target)


@dataclass(frozen=True)
class Block:
    """A block of a container such as a `ModuleList`."""

    container: str
    index: int
    name: str


@dataclass(frozen=True)
class Removal:
    """The blocks that a search removed, and the errors and reasons of the others."""

    steps: tuple[tuple[Block, OutputError], ...]
    """Each block in the order of removal, with the error after all removals so far."""
    alone: Mapping[Block, OutputError]
    """The error of each block's removal alone."""
    refused: Mapping[str, str]
    """Block that cannot be removed → why."""


def all_blocks(module: nn.Module) -> list[Block]:
    """Return the repeated blocks of all lists and sequences, the outer ones first."""
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
    """Return blocks that cannot be skipped → why: input and output have different shapes."""
    reasons = {}
    shapes: dict[str, list[tuple[tuple[int, ...] | None, ...]]] = {}
    with ExitStack() as hooks:
        for block in blocks:

            def record(
                _: nn.Module, args: Any, kwargs: Any, output: Any, name: str = block.name
            ) -> None:
                shapes[name].append((_first_shape((args, kwargs)), _first_shape(output)))

            shapes[block.name] = []
            own = module.get_submodule(block.name)
            hooks.callback(own.register_forward_hook(record, with_kwargs=True).remove)
        run_in_eval(module, inputs)
    for name, calls in shapes.items():
        mismatch = next((call for call in calls if call[0] != call[1] or None in call), None)
        if not calls:
            reasons[name] = "it is not called"
        elif mismatch:
            reasons[name] = f"its input has shape {mismatch[0]} and its output {mismatch[1]}"
    return reasons


def kept_without(module: nn.Module, removed: Collection[Block]) -> dict[str, tuple[int, ...]]:
    """Return, for each container that loses blocks, the indices of the entries that stay."""
    kept = {}
    for container in dict.fromkeys(block.container for block in removed):
        leaving = {block.index for block in removed if block.container == container}
        count = len(module.get_submodule(container)._modules)
        kept[container] = tuple(i for i in range(count) if i not in leaving)
    return kept


def remove_named(
    module: nn.Module,
    names: Iterable[str],
    blocks: Sequence[Block],
    refused: Mapping[str, str],
    meter: OutputErrorMeter,
) -> Removal:
    """Remove blocks in the order of their names, and measure the output error after each.

    The module is not changed.

    Raises:
        StageFailed: a name is none of the blocks, or of one that has to stay, is inside a removed
            one or the last of its list, or the model does not run without it.
    """
    known = {block.name: block for block in blocks}
    for name in names:
        if name not in known:
            raise StageFailed(f"{name!r} is not a repeated block; these are: {', '.join(known)}")
        if name in refused:
            raise StageFailed(f"{name} cannot be removed: {refused[name]}")
    blocks = [known[name] for name in dict.fromkeys(names)]
    steps: list[tuple[Block, OutputError]] = []
    for block in blocks:
        gone = [removed for removed, _ in steps]
        if block not in _removable(module, blocks, gone):
            raise StageFailed(
                f"{block.name} cannot be removed with {', '.join(b.name for b in gone)}: it is "
                "inside one of them, or the last of its list"
            )
        error = _error_without(module, [*gone, block], meter)
        if isinstance(error, str):
            raise StageFailed(f"{block.name} cannot be removed: {error}")
        steps.append((block, error))
    if reason := _untrainable(module, blocks, meter):
        raise StageFailed(f"{', '.join(b.name for b in blocks)} cannot be removed: {reason}")
    return Removal(tuple(steps), {}, {})


def search(
    module: nn.Module,
    blocks: Sequence[Block],
    count: int | None,
    meter: OutputErrorMeter,
    refused: Mapping[str, str],
    progress: Progress,
    deadline: float = math.inf,
) -> Removal:
    """Remove blocks one after the other, each time the one with the least output error.

    As many as can be where ``count`` is None; StageFailed where fewer than it can be. No further
    block is searched after a ``deadline`` on the clock of :func:`time.monotonic`. The module is not
    changed; ``refused`` gives blocks that stay, and why.
    """
    # Greedy, because errors depend on the blocks already removed: the best pair is seldom made of
    # the two blocks with the least errors alone.
    refused = dict(refused)
    alone: dict[Block, OutputError] = {}
    steps: list[tuple[Block, OutputError]] = []
    most = len(blocks) if count is None else count
    total = sum(max(0, len(blocks) - done) for done in range(most))
    tried = 0
    while len(steps) < most and time.monotonic() < deadline:
        gone = [block for block, _ in steps]
        errors: dict[Block, OutputError] = {}
        for block in _removable(module, blocks, gone):
            tried += 1
            progress("remove blocks", min(tried, total), total, f"{len(steps)} of {most} removed")
            error = _error_without(module, [*gone, block], meter)
            if isinstance(error, str):
                refused.setdefault(block.name, error)
            else:
                errors[block] = error
        alone = alone or errors
        # The check of training is slow and seldom fails, so it is made of the best block first.
        for block in sorted(errors, key=lambda block: errors[block].order):
            reason = _untrainable(module, [*gone, block], meter)
            if reason is None:
                steps.append((block, errors[block]))
                break
            refused[block.name] = reason
        else:
            if count is None:
                break
            shown = [f"{name}: {reason}" for name, reason in list(refused.items())[:3]]
            more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
            why = f" ({'; '.join(shown)}{more})" if shown else ", because each list keeps one block"
            raise StageFailed(f"{count} blocks are to be removed and {len(steps)} can be{why}")
        blocks = [block for block in blocks if block in errors and block.name not in refused]
    if tried < total:  # fewer trials than expected, because blocks within removed ones are skipped
        progress("remove blocks", total, total)
    return Removal(tuple(steps), alone, refused)


def _removable(module: nn.Module, blocks: Sequence[Block], gone: Sequence[Block]) -> list[Block]:
    """Return the blocks that are not inside a removed one and not the last of their container."""
    kept = kept_without(module, gone)
    return [
        block
        for block in blocks
        if block not in gone
        and not any(f"{block.name}.".startswith(f"{other.name}.") for other in gone)
        and len(kept.get(block.container, (0, 1))) > 1
    ]


def _error_without(
    module: nn.Module, removed: Sequence[Block], meter: OutputErrorMeter
) -> OutputError | str:
    """Return the output error of removing blocks, or why they cannot be removed."""
    trial = shallow_copy(module)
    try:
        keep_blocks_(trial, kept_without(module, removed))
        return meter.measure(trial)
    except Exception as error:  # noqa: BLE001 - a forward may fail in any way
        raise_if_resources_ran_out(error)
        if isinstance(error, StageFailed):
            return str(error)
        return f"the model without it fails: {type(error).__name__}: {first_line(error)}"


def _untrainable(
    module: nn.Module, removed: Sequence[Block], meter: OutputErrorMeter
) -> str | None:
    """Return why the model without some blocks cannot run in training mode, if the whole can."""
    inputs = tuple(x.to(meter.context.device) for x in meter.batches[0].inputs)
    trial = shallow_copy(module)
    keep_blocks_(trial, kept_without(module, removed))
    reason = training_mismatch(trial, inputs, shapes_in_training(module, inputs))
    return f"the model without it {reason}" if reason else None


def _first_shape(value: Any) -> tuple[int, ...] | None:
    tensors = (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return next((tuple(tensor.shape) for tensor in tensors), None)
