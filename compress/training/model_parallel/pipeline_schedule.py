"""Pipeline parallelism: parts of a batch flow through the parts of a model, and back.

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

from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs
from compress.data.splits import Batch
from compress.training.model_parallel.equivalence_check import (
    Proof,
    everywhere,
    named,
    probing_loss,
    take_sketches_,
)
from compress.training.model_parallel.pipeline_stage import Form, Parts

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


class Pipe(Parts):
    """The parts of a module that this process trains."""

    def __init__(
        self, module: nn.Module, partition: Partition, settings: Pipeline, group: dist.ProcessGroup
    ) -> None:
        """Keep this process's parts of a module, in place."""
        self.ties = _ties(module, partition, settings.stages)
        super().__init__(module, partition, settings, group)
        self.schedule: Any = None
        self.shapes: list[torch.Size] = []
        """Shapes of the inputs for which the schedule is made."""
        self.batches: list[Batch] = []
        self.loss: LossFunction | None = None

    def step(
        self,
        batch: Batch,
        loss: LossFunction,
        precision: Callable[[], AbstractContextManager[object]],
    ) -> float:
        """Compute the gradients of a batch, in place, and return its mean loss in every process."""
        self.batches = cut(batch, self.settings.microbatches)
        self.loss, self.precision = loss, precision
        self._schedule_for([x.shape for x in self.batches[0].inputs])
        numbers = torch.arange(len(self.batches), device=self.device)
        losses: list[torch.Tensor] = []
        begins, ends = 0 in self.own, self.settings.parts - 1 in self.own
        try:
            self.schedule.step(
                *[numbers][: int(begins)],
                number=numbers,
                return_outputs=False,
                **({"target": numbers, "losses": losses} if ends else {}),
            )
        except RuntimeError as error:
            raise error.__cause__ or error from None  # torch's own words hold whole tensors
        value = torch.tensor([sum(loss.item() for loss in losses)], dtype=torch.float64)
        dist.broadcast(value, group=self.group, group_src=self.settings.stages - 1)
        return value.item()

    def prove(self, proof: Proof) -> None:
        """Compare outputs and gradients with the whole model's.

        Raises:
            StageFailed: they differ.
        """
        with torch.no_grad():
            outputs = flatten_outputs(self.module.eval()(*proof.inputs))
        wrong = proof.wrong_output(outputs)
        if everywhere(not wrong):
            self.step(Batch(proof.inputs, None), lambda out, _: probing_loss(out), nullcontext)
            self.add_up_ties(dict(self.module.named_parameters()))
            names = proof.wrong_gradients(take_sketches_(self.module))
            wrong = f"the gradient of {named(names)} differs" if names else ""
            self.shapes = []  # of another precision, perhaps
        if not everywhere(not wrong):
            raise StageFailed(
                "parallel.pipeline: cut into parts the model does not answer as the whole one: "
                f"{wrong or 'another process says so'}; name modules in pipeline.split that take "
                "one tensor, on which alone all that follows depends"
            )

    def whole_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the norm over all stages, given this one's; what several hold counts once."""
        square = norm.detach().clone() ** 2
        weights = dict(self.module.named_parameters())
        for name, stages in self.ties.items():
            gradient = weights[name].grad if name in weights else None
            if gradient is not None and self.stage != min(stages):
                square -= gradient.norm() ** 2
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    def add_up_ties(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Add up the gradients of weights that several stages hold, in place."""
        for name in self.ties:
            prefix, _, own = name.rpartition(".")
            weight: torch.Tensor = getattr(self.module.get_submodule(prefix), own)
            total = torch.zeros_like(weight, memory_format=torch.contiguous_format)
            if name in weights and weight.grad is not None:
                total = weight.grad
            dist.all_reduce(total, group=self.group)
            if name in weights:
                weight.grad = total

    def refuse_ties(self, parallel: Parallel) -> None:
        """Refuse weights that several stages hold where their gradients cannot be added up.

        Raises:
            StageFailed: there are such weights, and they are sharded.
        """
        if self.ties and (parallel.sharding_mode or parallel.tensor > 1):
            raise StageFailed(
                f"parallel.pipeline: several stages use the weight {named(self.ties)}, which "
                "works with strategy: ddp, and without tensor"
            )

    def _schedule_for(self, shapes: list[torch.Size]) -> None:
        """Make the schedule, unless that for these inputs is there."""
        if shapes == self.shapes:
            return
        self.measure(self.batches[0].inputs)
        stages = [self._torch_stage(part) for part in self.own]
        interleaved = self.settings.schedule == "interleaved_1f1b"
        self.schedule = SCHEDULES[self.settings.schedule](
            stages if interleaved else stages[0],
            self.settings.microbatches,
            loss_fn=self._loss_of,
            scale_grads=False,
        )
        self.shapes = shapes

    def _torch_stage(self, part: int) -> PipelineStage:
        # Told in full, torch has no reason to run the model once more to find it out.
        forms: list[list[Form]] = [[(torch.Size([1]), torch.int64)], *self.forms]
        return PipelineStage(
            Part(self, part),
            part,
            self.settings.parts,
            self.device,
            input_args=tuple(_like(form, self.device) for form in forms[part]),
            output_args=tuple(_like(form, self.device) for form in forms[part + 1]),
            group=self.group,
        )

    def _loss_of(self, outputs: Any, number: torch.Tensor) -> torch.Tensor:
        assert self.loss is not None
        with self.precision():
            batch = self.batches[int(number)]
            loss = self.loss(flatten_outputs(outputs), batch)
        return loss / len(self.batches)


class Part(nn.Module):
    """One part as a module of its own; its weights stay the whole module's."""

    def __init__(self, pipe: Pipe, number: int) -> None:
        """Take the part of a number."""
        super().__init__()
        self.pipe, self.number = pipe, number

    def forward(self, *handed: torch.Tensor, number: torch.Tensor) -> Any:
        """Return what comes out for a numbered part of the batch."""
        inputs = self.pipe.batches[int(number)].inputs
        return self.pipe.ask(self.number, handed[0] if self.number else None, inputs)


def _like(form: Form, device: torch.device) -> torch.Tensor:
    shape, dtype = form
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=dtype.is_floating_point)


def cut(batch: Batch, parts: int) -> list[Batch]:
    """Return equal parts of a batch.

    Raises:
        StageFailed: it does not divide.
    """
    if len(batch) % parts:
        raise StageFailed(
            f"parallel.pipeline: {len(batch)} samples do not divide into {parts} micro-batches"
        )
    inputs = zip(*(x.chunk(parts) for x in batch.inputs), strict=True)
    targets = (None,) * parts if batch.target is None else batch.target.chunk(parts)
    answers = [x.chunk(parts) for x in batch.teacher_outputs]
    taught = [tuple(column[part] for column in answers) for part in range(parts)]
    return [Batch(*own) for own in zip(inputs, targets, taught, strict=True)]


def _ties(module: nn.Module, partition: Partition, stages: int) -> dict[str, set[int]]:
    """Return the stages of each trained weight that several of them use."""
    held = {
        name: {part % stages for part in partition.weights[name]}
        for name, weight in module.named_parameters()
        if weight.requires_grad
    }
    return {name: several for name, several in held.items() if len(several) > 1}
