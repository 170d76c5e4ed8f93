"""Pipeline parallelism: micro-batches flow through the stages of a model, forward and backward.

After Huang et al., "GPipe" (2019), and Narayanan et al., "PipeDream" (2019) and "Efficient
Large-Scale Language Model Training on GPU Clusters" (2021), and Qi et al., "Zero Bubble Pipeline
Parallelism" (2023). The schedules are torch's own.

A part runs the model's own ``forward`` from the module where it starts to the one where the next
part starts. Nothing is traced: control flow, dropout and names of weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor

from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs, preserve_modes
from compress.common.process import random_state_kept
from compress.core.validation_errors import closest
from compress.data.batch import Batch
from compress.data.targets import select
from compress.training.model_parallel.equivalence_check import full_precision, probing_loss
from compress.training.optim.transformer_blocks import repeated_blocks

if TYPE_CHECKING:
    from compress.training.config.parallel import PipelineParallel
    from compress.training.objectives.objective import LossFunction

NO_BLOCKS = (
    "parallel.pipeline: the model has no repeated blocks; name the modules with which the parts "
    "begin in pipeline.split"
)


@dataclass
class Partition:
    """Division of a model into parts, numbered in the order in which they compute."""

    split_points: list[str]
    """Names of the modules with which the parts after the first start."""
    weights: dict[str, set[int]] = field(default_factory=dict)
    """The parts that use each weight."""
    buffers: dict[str, set[int]] = field(default_factory=dict)
    """The parts that use each buffer."""
    blocks: dict[str, tuple[int, tuple[Any, ...] | None]] = field(default_factory=dict)
    """Blocks whose output has the shape of their input, and so can be skipped: their part, and the
    further values that they return in a tuple (None: they return the tensor alone)."""


def split_into_parts(
    module: nn.Module, pipeline: PipelineParallel, inputs: Sequence[torch.Tensor]
) -> Partition:
    """Divide a module as the settings say: at `split`, or evenly between repeated blocks."""
    names = {id(part): name for name, part in module.named_modules()}
    try:
        blocks = [names[id(block)] for block in repeated_blocks(module, NO_BLOCKS)]
    except StageFailed:
        if not pipeline.split:
            raise
        blocks = []
    if pipeline.split:
        for name in pipeline.split:
            if name not in names.values():
                near = closest(name, names.values())
                hint = f"; did you mean {near!r}?" if near else ""
                raise StageFailed(f"parallel.pipeline: the model has no module {name!r}{hint}")
    elif len(blocks) < pipeline.parts:
        raise StageFailed(
            f"parallel.pipeline: {len(blocks)} repeated blocks do not fill {pipeline.parts} parts; "
            "lower pipeline.stages, or name modules in pipeline.split"
        )
    split_points = list(pipeline.split) or [
        blocks[len(blocks) * k // pipeline.parts] for k in range(1, pipeline.parts)
    ]
    return _TracedRun(module, split_points, blocks).partition(inputs)


def strip_(
    module: nn.Module, partition: Partition, own: Iterable[int], device: torch.device
) -> None:
    """Remove the weights and buffers of all other parts, in place.

    Weights may be on the meta device; what takes their place is on the given one.
    """
    parts = set(own)
    for prefix, part in module.named_modules():
        for name, weight in list(part._parameters.items()):
            path = f"{prefix}.{name}".lstrip(".")
            if weight is not None and not partition.weights[path] & parts:
                del part._parameters[name]
                # Modules before this process's first block still run, on zeros that take no memory;
                # their results are not used.
                value = weight.detach()
                local = value.to_local() if isinstance(value, DTensor) else value
                zeros = torch.zeros((), dtype=local.dtype, device=device).expand(local.shape)
                if isinstance(value, DTensor):
                    zeros = DTensor(zeros, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
                setattr(part, name, zeros)
        for name, buffer in list(part._buffers.items()):
            path = f"{prefix}.{name}".lstrip(".")
            if buffer is not None and not partition.buffers[path] & parts:
                del part._buffers[name]
                setattr(part, name, buffer)


def find_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str | int, torch.Tensor]:
    """Return a call's first floating-point tensor, after its position or keyword."""
    # `hidden_states` is transformers' name of what flows from block to block.
    places: list[tuple[str | int, Any]] = [
        *enumerate(args),
        *sorted(kwargs.items(), key=lambda e: e[0] != "hidden_states"),
    ]
    for place, value in places:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return place, value
    raise StageFailed("parallel.pipeline: a part begins with a module that takes no tensor")


class _TracedRun:
    """One forward pass of the whole model, in which hooks record what each part uses."""

    def __init__(self, module: nn.Module, split_points: list[str], blocks: list[str]) -> None:
        self.module = module
        self.result = Partition(split_points)
        self.blocks = blocks
        self.split_nodes: list[Any] = []  # the autograd node of the tensor at each split point
        self.buffer_users: dict[str, set[int]] = {}
        """The parts in which each module with buffers is called."""

    def partition(self, inputs: Sequence[torch.Tensor]) -> Partition:
        # Frozen weights too must be part of the graph, by which weights are assigned to parts.
        trained = [(w, w.requires_grad) for w in self.module.parameters() if w.is_floating_point()]
        with ExitStack() as stack:
            for weight, was in trained:
                weight.requires_grad_(True)
                stack.callback(weight.requires_grad_, was)
            for number, name in enumerate(self.result.split_points):
                part = self.module.get_submodule(name)
                before_part = partial(self._at_split_point, number, name)
                stack.enter_context(part.register_forward_pre_hook(before_part, with_kwargs=True))
            for name in self.blocks:
                block = self.module.get_submodule(name)
                after_block = partial(self._after_block, name)
                stack.enter_context(block.register_forward_hook(after_block, with_kwargs=True))
            for name, part in self.module.named_modules():
                if part._buffers:
                    use_buffers = partial(self._use_buffers, name)
                    stack.enter_context(part.register_forward_pre_hook(use_buffers))
            with torch.enable_grad():
                outputs = flatten_outputs(self.module.eval()(*inputs))
            self._assign([o.grad_fn for o in outputs if o.grad_fn is not None])
        return self.result

    def _at_split_point(self, number: int, name: str, part: nn.Module, args: Any, kw: Any) -> None:
        if len(self.split_nodes) != number:
            raise StageFailed(
                f"parallel.pipeline: {name!r} is called twice or before an earlier part; "
                "name modules that are called once, in order, in pipeline.split"
            )
        self.split_nodes.append(find_tensor(args, kw)[1].grad_fn)

    def _after_block(self, name: str, part: nn.Module, args: Any, kw: Any, out: Any) -> None:
        hidden = find_tensor(args, kw)[1]
        first, *rest = out if isinstance(out, tuple) and out else (out,)
        one_tensor = not any(isinstance(value, torch.Tensor) for value in rest)
        if isinstance(first, torch.Tensor) and first.shape == hidden.shape and one_tensor:
            structure = tuple(rest) if isinstance(out, tuple) else None
            self.result.blocks[name] = (len(self.split_nodes), structure)

    def _use_buffers(self, name: str, part: nn.Module, args: Any) -> None:
        self.buffer_users.setdefault(name, set()).add(len(self.split_nodes))

    def _assign(self, ends: list[Any]) -> None:
        """Assign each weight to the parts between whose start and end it is used."""
        if len(self.split_nodes) != len(self.result.split_points):
            missing = self.result.split_points[len(self.split_nodes)]
            raise StageFailed(f"parallel.pipeline: {missing!r} is never called")
        every, last = range(len(self.split_nodes) + 1), len(self.split_nodes)
        users: dict[int, set[int]] = {}
        for part in every:
            start = self.split_nodes[part - 1] if part else None
            stops = [self.split_nodes[part]] if part < last else ends
            for weight in leaves_between(start, stops):
                users.setdefault(id(weight), set()).add(part)
        for name, weight in self.module.named_parameters(remove_duplicate=False):
            self.result.weights[name] = users.get(id(weight), {last})
        for name, _ in self.module.named_buffers(remove_duplicate=False):
            self.result.buffers[name] = self.buffer_users.get(name.rpartition(".")[0], set(every))


def leaves_between(start: Any, ends: list[Any]) -> list[torch.Tensor]:
    """Return the leaves of the autograd graph between a node and later ones."""
    pending, seen, leaves = [end for end in ends if end is not None], {start}, []
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # AccumulateGrad
            leaves.append(node.variable)
        pending += [before for before, _ in node.next_functions if before is not None]
    return leaves


ShapeDtype = tuple[torch.Size, torch.dtype]


class PipelineRunner:
    """Runs the parts of a module that this process has.

    The module itself stays callable: a call runs all parts, in all processes of the pipeline, and
    gives the outputs in each of them.
    """

    def __init__(
        self,
        module: nn.Module,
        partition: Partition,
        settings: PipelineParallel,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Replace a module's ``forward``, and remove other parts' weights, on meta devices too."""
        stages_of = {
            name: {settings.stage_of(part) for part in partition.weights[name]}
            for name, weight in module.named_parameters()
            if weight.requires_grad
        }
        self.tied_stages = {name: users for name, users in stages_of.items() if len(users) > 1}
        """The stages of each trained weight that several of them use."""
        self.module, self.partition, self.settings, self.group = module, partition, settings, group
        self.stage = dist.get_rank(group)
        self.own = [part for part in range(settings.parts) if settings.stage_of(part) == self.stage]
        self.device = device
        self.precision: Callable[[], AbstractContextManager[object]] = nullcontext
        """Context of forward passes in training (autocast)."""
        self.output_specs: list[list[ShapeDtype]] = []
        """Shapes and dtypes of each part's outputs in the latest run of all parts."""
        self.schedule: Any = None
        self.shapes: list[torch.Size] = []  # shapes of the inputs for which `schedule` was built
        self.batches: list[Batch] = []
        self.weights: Sequence[float] | torch.Tensor = ()
        """What the mean loss of each micro-batch is multiplied by."""
        self.loss: LossFunction | None = None
        self.requested: tuple[int, torch.Tensor | None] | None = None
        """The one part that the next call of the module runs, and its input; None for all parts."""
        self.running: int | None = None
        self.hidden: torch.Tensor | None = None  # input of the running part, from the part before
        strip_(module, partition, self.own, device)
        self.model_forward = module.forward
        module.forward = self._forward
        for name, (part, rest) in partition.blocks.items():
            block = module.get_submodule(name)
            block.forward = partial(self._block_forward, block.forward, part, rest)

    def register_hooks(self) -> ExitStack:
        """Register forward hooks on the modules with which parts start; closing removes them."""
        stack = ExitStack()
        for number, name in enumerate(self.partition.split_points, 1):
            # Prepended: where a part ends, FSDP's hook must not gather a module that will not run.
            part, enter = self.module.get_submodule(name), partial(self._at_split_point, number)
            handle = part.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
            stack.enter_context(handle)
        return stack

    def run_part(
        self, part: int, hidden: torch.Tensor | None, inputs: Sequence[torch.Tensor]
    ) -> Any:
        """Call the module, including FSDP's hooks around it, for one part."""
        self.requested = (part, hidden)
        try:
            with self.precision():
                return self.module(*inputs)
        finally:
            self.requested = None

    def without_split_points(self, blocks: Sequence[nn.Module]) -> list[nn.Module]:
        """Return the blocks in which no part ends, which FSDP may wrap."""
        # The forward of the others is left by an exception, after which FSDP's hooks do not run.
        starts = {self.module.get_submodule(name) for name in self.partition.split_points}
        return [block for block in blocks if not starts & (set(block.modules()) - {block})]

    def _forward(self, *inputs: torch.Tensor) -> Any:
        """Replace the module's forward: run all parts in turn, or the requested one."""
        if self.requested is not None:
            return self._run(*self.requested, inputs)
        return tuple(self._run_all(self._run, inputs))

    def _run_all(
        self, run: Callable[..., Any], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run every part in the process that has it; return the outputs in all processes."""
        self.output_specs = []
        tensors: list[torch.Tensor] = []
        for part in range(self.settings.parts):
            specs: list[Any] = [None]
            if part in self.own:
                try:
                    out = run(part, tensors[0] if tensors else None, inputs)
                except (RuntimeError, ValueError, TypeError) as error:
                    # The other processes wait for the outputs.
                    specs = [error]
                else:
                    tensors = [out] if isinstance(out, torch.Tensor) else list(out)
                    specs = [[(tensor.shape, tensor.dtype) for tensor in tensors]]
            source = self.settings.stage_of(part)
            # Receivers must allocate: only the process that ran the part knows the shapes.
            dist.broadcast_object_list(specs, group=self.group, group_src=source)
            if isinstance(specs[0], Exception):
                raise specs[0]
            if self.stage != source:
                tensors = [torch.empty(s, dtype=d, device=self.device) for s, d in specs[0]]
            tensors = [tensor.detach().contiguous() for tensor in tensors]
            for tensor in tensors:
                dist.broadcast(tensor, group=self.group, group_src=source)
            self.output_specs.append(specs[0])
        return tensors

    def _run(self, part: int, hidden: torch.Tensor | None, inputs: Sequence[torch.Tensor]) -> Any:
        """Return a part's output for the next part, or the model's outputs after the last."""
        self.running, self.hidden = part, hidden
        try:
            outputs = self.model_forward(*inputs)
        except _PartEnd as end:
            (hidden,) = end.args
            return hidden.contiguous()
        finally:
            self.running = self.hidden = None
        return tuple(output.contiguous() for output in flatten_outputs(outputs))

    def _block_forward(
        self, forward: Callable[..., Any], part: int, rest: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Replace a block's forward: blocks of earlier parts return their input unchanged."""
        if self.running is None or part >= self.running:
            return forward(*args, **kwargs)
        hidden = find_tensor(args, kwargs)[1]
        return hidden if rest is None else (hidden, *rest)

    def _at_split_point(
        self, number: int, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        place, hidden = find_tensor(args, kwargs)
        if self.running is not None and number == self.running + 1:
            raise _PartEnd(hidden)
        if number != self.running or self.hidden is None:
            return None
        if isinstance(place, str):
            return args, {**kwargs, place: self.hidden}
        return (*args[:place], self.hidden, *args[place + 1 :]), kwargs

    def split(self, batch: Batch) -> list[Batch]:
        """Split a batch into the micro-batches of the schedule, or refuse it."""
        parts = self.settings.microbatches
        if len(batch) % parts:
            raise StageFailed(
                f"parallel.pipeline: {len(batch)} samples do not divide into {parts} micro-batches"
            )
        inputs = zip(*(x.chunk(parts) for x in batch.inputs), strict=True)
        size = len(batch) // parts
        shares = [slice(start, start + size) for start in range(0, len(batch), size)]
        targets = [None if batch.target is None else select(batch.target, i) for i in shares]
        taught = [tuple(x[share] for x in batch.teacher_outputs) for share in shares]
        return [Batch(*fields) for fields in zip(inputs, targets, taught, strict=True)]

    def step(
        self,
        batches: list[Batch],
        weights: Sequence[float] | torch.Tensor,
        loss: LossFunction,
        precision: Callable[[], AbstractContextManager[object]],
    ) -> float:
        """Compute gradients in place; return the weighted sum of the micro-batches' mean losses."""
        self.batches, self.weights = batches, weights
        self.loss, self.precision = loss, precision
        self._build_schedule([x.shape for x in self.batches[0].inputs])
        # The schedule gets the numbers of micro-batches instead of inputs and targets: it gives
        # inputs to the first part alone, and here each part runs the model's forward on all. They
        # stay in main memory: reading one from a CUDA device would wait for all that it computes.
        numbers = torch.arange(len(self.batches))
        losses: list[torch.Tensor] = []
        has_first, has_last = 0 in self.own, self.settings.parts - 1 in self.own
        try:
            self.schedule.step(
                *[numbers][: int(has_first)],
                number=numbers,
                return_outputs=False,  # the losses have read them
                **({"target": numbers, "losses": losses} if has_last else {}),
            )
        except RuntimeError as error:
            # torch wraps errors in messages that print whole tensors.
            raise error.__cause__ or error from None
        on_cpu = torch.stack(losses).tolist() if losses else []
        value = torch.tensor([sum(on_cpu)], dtype=torch.float64)
        dist.broadcast(
            value, group=self.group, group_src=self.settings.stage_of(self.settings.parts - 1)
        )
        return value.item()

    def compute_probing_gradients_(self, inputs: Sequence[torch.Tensor]) -> None:
        """Compute the gradients of :func:`probing_loss` by the schedule, in place."""
        batches = self.split(Batch(tuple(inputs), None))
        weights = [1 / len(batches)] * len(batches)
        with full_precision():
            self.step(batches, weights, lambda out, _: probing_loss(out), nullcontext)
        self.sum_tied_gradients_(dict(self.module.named_parameters()))
        self.shapes = []  # training may use another precision, and so other dtypes

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

    def _build_schedule(self, shapes: list[torch.Size]) -> None:
        if shapes == self.shapes:
            return
        with preserve_modes(self.module), torch.no_grad(), random_state_kept(str(self.device)):
            self.module.eval()
            self._run_all(self.run_part, self.batches[0].inputs)  # records `output_specs`
        # Given all shapes, torch need not run the model once more to infer them.
        specs: list[list[ShapeDtype]] = [[(torch.Size([1]), torch.int64)], *self.output_specs]
        stages = [
            NeighborStage(
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

        def micro_batch_loss(outputs: Any, number: torch.Tensor) -> torch.Tensor:
            assert self.loss is not None
            index = int(number)
            with self.precision():
                loss = self.loss(flatten_outputs(outputs), self.batches[index])
            return loss * self.weights[index]

        kind: Any = get_schedule_class(self.settings.schedule.replace("_", ""))
        self.schedule = kind(
            stages if self.settings.parts > self.settings.stages else stages[0],
            self.settings.microbatches,
            loss_fn=micro_batch_loss,
            scale_grads=False,  # the losses are weighted already
        )
        self.shapes = shapes


class PartModule(nn.Module):
    """One part as the module that torch's schedule calls; its weights stay the whole module's."""

    def __init__(self, runner: PipelineRunner, part: int) -> None:
        super().__init__()
        self.runner, self.part = runner, part

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the weights that the part uses, whose gradients zero-bubble schedules compute."""
        users = self.runner.partition.weights
        for name, weight in self.runner.module.named_parameters():
            if self.part in users[name]:
                yield weight

    def forward(self, *hidden: torch.Tensor, number: torch.Tensor) -> Any:
        """Compute the part's output for the micro-batch of a number."""
        inputs = self.runner.batches[int(number)].inputs
        return self.runner.run_part(self.part, hidden[0] if self.part else None, inputs)


class NeighborStage(PipelineStage):
    """A stage that opens no connection to its own process, which gloo lacks.

    Two stages that follow each other are in one process in `zbv_zero_bubble`. torch 2.11 opens a
    connection between them; 2.13 does not.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        operations = super()._get_init_p2p_neighbors_ops()
        return [op for op in operations if op.group_peer != self.group_rank]


def _empty(spec: ShapeDtype, device: torch.device) -> torch.Tensor:
    shape, dtype = spec
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=dtype.is_floating_point)


class _PartEnd(Exception):
    """Ends the model's forward where the next part starts, with what flows there."""

    # An exception, because nothing else returns from the midst of the model's own code.
