"""Pipeline parallelism: micro-batches flow through the stages of a model, forward and backward.

After Huang et al., "GPipe" (2019), and Narayanan et al., "PipeDream" (2019) and "Efficient
Large-Scale Language Model Training on GPU Clusters" (2021). The schedules are torch's own.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from compress.artifacts.eager_model import flatten_outputs
from compress.common.errors import StageFailed
from compress.data.splits import Batch
from compress.training.model_parallel.equivalence_check import (
    ReferenceRun,
    first_and_count,
    probing_loss,
    take_gradient_sketches_,
    true_on_all_ranks,
)
from compress.training.model_parallel.pipeline_stage import LocalParts, ShapeDtype

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from compress.training.config.parallel import Parallel
    from compress.training.config.pipeline import Pipeline
    from compress.training.model_parallel.pipeline_split import Partition
    from compress.training.objectives.objective import LossFunction

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
}


class PipelineRunner(LocalParts):
    """Runs training steps of the model parts that this process has."""

    def __init__(
        self, module: nn.Module, partition: Partition, settings: Pipeline, group: dist.ProcessGroup
    ) -> None:
        """Remove the weights of all other parts from a module, in place."""
        self.tied_stages = _tied_stages(module, partition, settings.stages)
        super().__init__(module, partition, settings, group)
        self.schedule: Any = None
        self.shapes: list[torch.Size] = []
        """Shapes of the inputs for which `schedule` was built."""
        self.batches: list[Batch] = []
        self.loss: LossFunction | None = None

    def step(
        self,
        batch: Batch,
        loss: LossFunction,
        precision: Callable[[], AbstractContextManager[object]],
    ) -> float:
        """Compute the gradients of a batch in place; return its mean loss in every process.

        Args:
            batch: this share's samples of the step.
            loss: the loss function.
            precision: gives the context of forward passes.
        """
        self.batches = split_batch(batch, self.settings.microbatches)
        self.loss, self.precision = loss, precision
        self._build_schedule([x.shape for x in self.batches[0].inputs])
        numbers = torch.arange(len(self.batches), device=self.device)
        losses: list[torch.Tensor] = []
        has_first, has_last = 0 in self.own, self.settings.parts - 1 in self.own
        try:
            self.schedule.step(
                *[numbers][: int(has_first)],
                number=numbers,
                return_outputs=False,
                **({"target": numbers, "losses": losses} if has_last else {}),
            )
        except RuntimeError as error:
            # torch wraps errors in messages that print whole tensors.
            raise error.__cause__ or error from None
        value = torch.tensor([sum(loss.item() for loss in losses)], dtype=torch.float64)
        dist.broadcast(value, group=self.group, group_src=self.settings.stages - 1)
        return value.item()

    def check_equivalence(self, reference: ReferenceRun) -> None:
        """Compare outputs and gradients with the whole model's.

        Raises:
            StageFailed: they differ.
        """
        with torch.no_grad():
            outputs = flatten_outputs(self.module.eval()(*reference.inputs))
        wrong = reference.output_mismatch(outputs)
        if true_on_all_ranks(not wrong):
            self.step(Batch(reference.inputs, None), lambda out, _: probing_loss(out), nullcontext)
            self.sum_tied_gradients_(dict(self.module.named_parameters()))
            names = reference.mismatched_gradients(take_gradient_sketches_(self.module))
            wrong = f"the gradient of {first_and_count(names)} differs" if names else ""
            self.shapes = []  # training may use another precision, and so other dtypes
        if not true_on_all_ranks(not wrong):
            raise StageFailed(
                "parallel.pipeline: divided into stages the model does not compute what the whole "
                f"one does: {wrong or 'reported by another process'}; name modules in "
                "pipeline.split that take the one tensor on which all later modules depend"
            )

    def global_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Compute the norm over all stages from this one's; tied weights count once."""
        square = norm.detach().clone() ** 2
        weights = dict(self.module.named_parameters())
        for name, stages in self.tied_stages.items():
            gradient = weights[name].grad if name in weights else None
            if gradient is not None and self.stage != min(stages):
                square -= gradient.norm() ** 2
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    def sum_tied_gradients_(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Sum the gradients of weights that several stages use, in place."""
        for name in self.tied_stages:
            prefix, _, own = name.rpartition(".")
            weight: torch.Tensor = getattr(self.module.get_submodule(prefix), own)
            total = torch.zeros_like(weight, memory_format=torch.contiguous_format)
            if name in weights and weight.grad is not None:
                total = weight.grad
            dist.all_reduce(total, group=self.group)
            if name in weights:
                weight.grad = total

    def require_supported_ties(self, parallel: Parallel) -> None:
        """Refuse sharded weights that several stages use: their gradients cannot be summed.

        Raises:
            StageFailed: there are such weights.
        """
        if self.tied_stages and (parallel.sharding_mode or parallel.tensor > 1):
            raise StageFailed(
                f"parallel.pipeline: several stages use the weight "
                f"{first_and_count(self.tied_stages)}, which works with strategy: ddp, and without "
                "tensor"
            )

    def _build_schedule(self, shapes: list[torch.Size]) -> None:
        """Build the schedule, unless the present one is for the same input shapes."""
        if shapes == self.shapes:
            return
        self.infer_shapes(self.batches[0].inputs)
        # Given all shapes, torch need not run the model once more to infer them.
        specs: list[list[ShapeDtype]] = [[(torch.Size([1]), torch.int64)], *self.output_specs]
        stages = [
            PipelineStage(
                PartModule(self, part),
                part,
                self.settings.parts,
                self.device,
                input_args=tuple(_empty(spec, self.device) for spec in specs[part]),
                output_args=tuple(_empty(spec, self.device) for spec in specs[part + 1]),
                group=self.group,
            )
            for part in self.own
        ]
        interleaved = self.settings.schedule == "interleaved_1f1b"
        self.schedule = SCHEDULES[self.settings.schedule](
            stages if interleaved else stages[0],
            self.settings.microbatches,
            loss_fn=self._micro_batch_loss,
            scale_grads=False,
        )
        self.shapes = shapes

    def _micro_batch_loss(self, outputs: Any, number: torch.Tensor) -> torch.Tensor:
        assert self.loss is not None
        with self.precision():
            batch = self.batches[int(number)]
            loss = self.loss(flatten_outputs(outputs), batch)
        return loss / len(self.batches)


class PartModule(nn.Module):
    """One part as the module that torch's schedule calls; its weights stay the whole module's."""

    def __init__(self, runner: PipelineRunner, part: int) -> None:
        """Refer to the part of a number."""
        super().__init__()
        self.runner, self.part = runner, part

    def forward(self, *hidden: torch.Tensor, number: torch.Tensor) -> Any:
        """Compute the part's output for the micro-batch of a number."""
        inputs = self.runner.batches[int(number)].inputs
        return self.runner.run_part(self.part, hidden[0] if self.part else None, inputs)


def _empty(spec: ShapeDtype, device: torch.device) -> torch.Tensor:
    shape, dtype = spec
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=dtype.is_floating_point)


def split_batch(batch: Batch, parts: int) -> list[Batch]:
    """Split a batch into micro-batches of equal size.

    Raises:
        StageFailed: the samples do not divide.
    """
    if len(batch) % parts:
        raise StageFailed(
            f"parallel.pipeline: {len(batch)} samples do not divide into {parts} micro-batches"
        )
    inputs = zip(*(x.chunk(parts) for x in batch.inputs), strict=True)
    targets = (None,) * parts if batch.target is None else batch.target.chunk(parts)
    columns = [x.chunk(parts) for x in batch.taught]
    taught = [tuple(column[part] for column in columns) for part in range(parts)]
    return [Batch(*fields) for fields in zip(inputs, targets, taught, strict=True)]


def _tied_stages(module: nn.Module, partition: Partition, stages: int) -> dict[str, set[int]]:
    """Return the stages of each trained weight that several of them use."""
    stages_of = {
        name: {part % stages for part in partition.weights[name]}
        for name, weight in module.named_parameters()
        if weight.requires_grad
    }
    return {name: users for name, users in stages_of.items() if len(users) > 1}
