"""The optimizer, gradient clipping, and the learning rate of each step."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from compress.common.errors import StageFailed, exits_refused, raised_as
from compress.common.factories import resolve

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from compress.core.metrics import Metric
    from compress.training.checkpoint import Epoch
    from compress.training.config.training import Training

FUSED_SHARDED = ("adam", "adamw")
"""Optimizers whose fused variant accepts DTensors (torch 2.13; not SGD's and Adagrad's)."""


def build_optimizer(module: torch.nn.Module, training: Training) -> Optimizer:
    """Build the optimizer; weight decay leaves out biases and norms, which are vectors."""
    groups = parameter_groups(module, training)
    with explain_rejected_arguments(training):
        optimizer: Optimizer = optimizer_class(training)(groups, **optimizer_arguments(training))
    if training.precision == "bf16-true" and training.compile == "none":
        # torchao compiles each step, which needs a C++ compiler and takes minutes.
        step = torch.compiler.set_stance("force_eager")(optimizer.step)
        optimizer.step = step  # type: ignore[method-assign]
    return optimizer


def parameter_groups(module: torch.nn.Module, training: Training) -> list[dict[str, Any]]:
    """Group the trainable weights: matrices, with weight decay, and vectors, without."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    if not trainable:
        raise StageFailed("the model has no weights that require gradients: nothing to train")
    # Muon is for the matrices of hidden layers: not for tables, also those that a head shares.
    kinds = torch.nn.Embedding, torch.nn.EmbeddingBag
    tables = {id(m.weight) for m in module.modules() if isinstance(m, kinds)}
    hidden, is_muon = set[int](), training.optimizer == "muon"
    if is_muon:
        hidden = {id(p) for p in trainable if p.ndim == 2} - tables
        if not hidden and not training.parallel.pipeline:  # of which a stage may have none
            raise StageFailed("muon is for matrices, and the model trains none; use adamw")
    full = training.weight_decay_or_default
    groups = [
        ([p for p in trainable if id(p) in hidden], full),
        ([p for p in trainable if p.ndim > 1 and id(p) not in hidden], full),
        ([p for p in trainable if p.ndim <= 1], 0.0),
    ]
    # torch's foreach and fused steps reject weights of several meshes in one group.
    return [
        {"params": same_mesh, "weight_decay": decay} | ({MUON: i == 0} if is_muon else {})
        for i, (members, decay) in enumerate(groups)
        for same_mesh in group_by_mesh(members)
    ]


MUON = "muon"
"""Option of a parameter group: whether its weights are matrices that Muon steps."""


class MuonWithAdamW(Optimizer):
    """Muon for the groups of matrices, AdamW for the others, as torch documents Muon."""

    def __init__(self, params: Iterable[dict[str, Any]], **options: Any) -> None:
        """Divide options among the two by their names: `betas` is AdamW's, `ns_steps` Muon's."""
        groups = [*params]
        super().__init__([{**group} for group in groups], {})
        kinds = {True: torch.optim.Muon, False: torch.optim.AdamW}
        known = {kind: inspect.signature(kind).parameters.keys() for kind in kinds.values()}
        if unknown := options.keys() - set().union(*known.values()):
            raise TypeError(f"unexpected {', '.join(sorted(unknown))}")
        self.parts: dict[bool, Optimizer] = {}
        for is_muon, kind in kinds.items():
            if own := [{**group} for group in groups if group[MUON] is is_muon]:
                taken = {name: v for name, v in options.items() if name in known[kind]}
                self.parts[is_muon] = kind(own, **taken)
        self.param_groups = [g for part in self.parts.values() for g in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all weights."""
        for is_muon, part in self.parts.items():
            # Loading a checkpoint replaces both.
            part.state = self.state
            part.param_groups = [group for group in self.param_groups if group[MUON] is is_muon]
            part.step()


def optimizer_class(training: Training) -> Any:
    """Return the class that the settings name: torch.optim's, or torchao's that rounds."""
    if training.precision == "bf16-true":
        from torchao.optim import _AdamW

        return _AdamW
    if training.optimizer == "muon":
        return MuonWithAdamW
    classes = {name.lower(): getattr(torch.optim, name) for name in torch.optim.__all__}
    return classes[training.optimizer]


def optimizer_arguments(training: Training) -> dict[str, Any]:
    """Return the optimizer's arguments besides its weights; `fused` is set where it works."""
    arguments: dict[str, Any] = {"lr": training.peak_learning_rate}
    if training.precision == "bf16-true":
        arguments["bf16_stochastic_round"] = True
    if training.optimizer == "sgd":
        arguments |= {"momentum": training.momentum_or_default, "nesterov": training.nesterov}
    if training.optimizer == "muon":
        arguments["adjust_lr_fn"] = "match_rms_adamw"  # with it one rate fits both
    has_fused = "fused" in inspect.signature(optimizer_class(training)).parameters
    is_sharded = training.parallel.sharding_mode is not None or training.parallel.tensor > 1
    # torch refuses `fused` beside either of the other two.
    is_chosen = {"fused", "foreach", "differentiable"} & training.optimizer_arguments.keys()
    if has_fused and not is_chosen and (not is_sharded or training.optimizer in FUSED_SHARDED):
        arguments["fused"] = True
    return arguments | training.optimizer_arguments


def explain_rejected_arguments(training: Training) -> AbstractContextManager[None]:
    """Return a context that names the setting to change where arguments are rejected."""
    what = f"optimizer {training.optimizer} refuses {optimizer_arguments(training)}"
    return raised_as(StageFailed, what, "; correct optimizer_arguments")


def group_by_mesh(weights: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group weights by the mesh over which they are sharded; unsharded ones form a group."""
    meshes: dict[object, list[torch.Tensor]] = defaultdict(list)
    for weight in weights:
        meshes[weight.device_mesh if isinstance(weight, DTensor) else None].append(weight)
    return list(meshes.values())


@torch.no_grad()
def clip_norm_(
    weights: Iterable[torch.Tensor],
    largest: float | None,
    global_norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Scale gradients, in place, to a largest global norm, if given; return that from before."""
    # torch.nn.utils.clip_grad_norm_ raises for gradients on different meshes. Here the norm is
    # computed for each mesh, and the global norm is the norm of these norms.
    meshes = group_by_mesh(weight for weight in weights if weight.grad is not None)
    norms = []
    for members in meshes:
        gradients = (weight.grad for weight in members if weight.grad is not None)
        values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        norm = torch.nn.utils.get_total_norm(values)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    norm = torch.linalg.vector_norm(torch.stack(norms or [torch.zeros(())]))
    total = global_norm(norm) if global_norm else norm  # over all pipeline stages
    if largest is not None:
        for members in meshes:
            torch.nn.utils.clip_grads_with_norm_(members, largest, total)
    return total


SCHEDULED = ("lr", "momentum", "betas")  # options of a parameter group that schedulers change


class ScheduledOptions(Optimizer):
    """The options of an optimizer's parameter groups, without weights: what a scheduler drives."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing; schedulers expect a step of the optimizer before each of theirs."""


class Schedule:
    """Sets learning rate and momentum of an optimizer, step by step, as torch's schedulers do.

    The scheduler drives a parameter group of its own, whose values :meth:`apply_` copies to those
    of the optimizer. Their number depends on the strategy, ZeroRedundancyOptimizer lacks the
    momentum in its ``defaults``, and loading a checkpoint may replace them. No state is saved: a
    resumed training repeats the scheduler's steps, some microseconds each, to the same bits.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        training: Training,
        steps_per_epoch: int,
        metric: Metric,
        folder: Path | None = None,
    ) -> None:
        """Start before the first step of a training; the user's scheduler is in a folder."""
        self.optimizer, self.steps_per_epoch = optimizer, steps_per_epoch
        options = {name: v for name, v in optimizer.param_groups[0].items() if name != "params"}
        # A number: torchao's optimizers hold a tensor, in float32.
        options["lr"] = training.peak_learning_rate
        self.options = ScheduledOptions([torch.zeros(1)], options)
        self.by_step = build_scheduler(self.options, training, steps_per_epoch, folder)
        self.by_epoch: lr_scheduler.ReduceLROnPlateau | None = None
        if training.schedule == "plateau":
            self.by_epoch = lr_scheduler.ReduceLROnPlateau(
                self.options,
                mode="max" if metric.higher_is_better else "min",
                factor=training.schedule_factor,
                # torch counts the epochs that it tolerates; the next one reduces.
                patience=training.epochs_per_reduction - 1,
                threshold=0.0,  # any gain counts, as for `early_stopping` and `keep: best`
                min_lr=training.min_learning_rate,
                eps=0.0,
            )

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(self.options.param_groups[0]["lr"])

    def apply_(self) -> None:
        """Set the values of the next step in all parameter groups of the optimizer."""
        (scheduled,) = self.options.param_groups
        values = {name: scheduled[name] for name in SCHEDULED if name in scheduled}
        for group in self.optimizer.param_groups:
            rate = group["lr"]
            group.update({name: v for name, v in values.items() if name in group})
            if isinstance(rate, torch.Tensor):
                group["lr"] = rate.fill_(values["lr"])

    def step(self) -> None:
        """Go on to the next step."""
        self.options.step()
        self.by_step.step()

    def finish_epoch(self, epoch: Epoch) -> None:
        """Reduce the learning rate of `plateau` if the metric has stopped improving."""
        if self.by_epoch is not None and epoch.metric is not None:
            self.by_epoch.step(epoch.metric)

    def fast_forward(self, history: Iterable[Epoch], steps: int) -> None:
        """Go from the start to the state after these epochs and some steps of the next one."""
        for epoch in history:
            if epoch.epoch > 0:  # 0 is the input model, whose metric counts too
                for _ in range(self.steps_per_epoch):
                    self.step()
            self.finish_epoch(epoch)
        for _ in range(steps):
            self.step()


def build_scheduler(
    optimizer: Optimizer,
    training: Training,
    steps_per_epoch: int,
    folder: Path | None = None,
) -> LRScheduler:
    """Build the scheduler to step after every optimizer step.

    All but `onecycle` and the user's own, which have a warm-up of their own, start with a linear
    warm-up from peak / steps to the peak.
    """
    steps, lowest = training.epochs * steps_per_epoch, training.min_learning_rate
    if training.has_custom_schedule:
        return _custom(optimizer, training.schedule, steps, folder)
    if training.schedule == "onecycle":
        return _one_cycle(optimizer, training, steps)
    warmup = min(round(training.warmup_share * steps), steps - 1)
    ramp = lr_scheduler.LinearLR(
        optimizer, start_factor=1 / max(1, warmup), total_iters=max(1, warmup - 1)
    )
    rest, period = steps - warmup, training.epochs_per_reduction * steps_per_epoch
    after: LRScheduler
    match training.schedule:
        case "step":  # at the end of an epoch also during the warm-up, so not after it
            factor = training.schedule_factor
            after = lr_scheduler.StepLR(optimizer, step_size=period, gamma=factor)
            return lr_scheduler.ChainedScheduler([ramp, after], optimizer)
        case "cosine":
            after = lr_scheduler.CosineAnnealingLR(optimizer, T_max=rest, eta_min=lowest)
        case "cosine_restarts":
            after = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=period, eta_min=lowest)
        case "linear":
            end = lowest / training.peak_learning_rate
            after = lr_scheduler.LinearLR(optimizer, 1.0, end_factor=end, total_iters=rest)
        case "polynomial":
            power = training.schedule_power
            after = lr_scheduler.PolynomialLR(optimizer, total_iters=rest, power=power)
        case _:  # `constant`, and `plateau` between its reductions
            return ramp
    if not warmup:  # torch 2.11's SequentialLR would start with the scheduler of no steps
        return after
    return lr_scheduler.SequentialLR(optimizer, [ramp, after], milestones=[warmup])


def _custom(optimizer: Optimizer, name: str, steps: int, folder: Path | None) -> LRScheduler:
    advice = "; it is called with the optimizer and the number of all steps"
    with raised_as(StageFailed, f"schedule: {name} raised", advice), exits_refused():
        scheduler = resolve(name, folder)(optimizer, steps)
    by_metric = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    if by_metric or not isinstance(scheduler, LRScheduler):
        raise StageFailed(
            f"schedule: {name} returned {type(scheduler).__name__}, expected a scheduler of "
            "torch.optim.lr_scheduler that is stepped without a metric"
            f"{'; use schedule: plateau' if by_metric else ''}"
        )
    return scheduler


def _one_cycle(optimizer: Optimizer, training: Training, steps: int) -> lr_scheduler.OneCycleLR:
    """Build a OneCycleLR, which cycles the momentum unless the settings give one."""
    (group,) = optimizer.param_groups
    has_momentum = "betas" in group or bool(group.get("momentum"))
    gives_momentum = bool({"momentum", "betas"} & training.optimizer_arguments.keys())
    gives_momentum |= training.optimizer == "sgd" and training.momentum is not None
    share = float(training.warmup_share)
    if share * steps == 1:
        share -= 1e-9  # with a rise of exactly one step torch 2.13 divides by zero
    return lr_scheduler.OneCycleLR(
        optimizer,
        max_lr=training.peak_learning_rate,
        total_steps=steps,
        pct_start=share,
        cycle_momentum=has_momentum and not gives_momentum,
    )
