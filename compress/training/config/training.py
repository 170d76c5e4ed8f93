"""Hyper-parameters shared by training, fine-tuning and distillation."""

from __future__ import annotations

import difflib
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from compress.common.config import Count, Fraction, Positive, Ratio, Settings
from compress.core.loss import Loss, refuse_class_settings
from compress.training.config.parallel import Parallel
from compress.training.config.profiling import Profile

# Those of torch.optim but LBFGS (wants a closure), SparseAdam and Muon (want special weights).
DEFAULT_LEARNING_RATE = {
    "adadelta": 1.0,
    "adafactor": 1e-2,
    "adagrad": 1e-2,
    "adam": 1e-3,
    "adamax": 2e-3,
    "adamw": 2e-3,
    "asgd": 1e-2,
    "nadam": 2e-3,
    "radam": 1e-3,
    "rmsprop": 1e-2,
    "rprop": 1e-2,
    "sgd": 0.1,
}
DEFAULT_WEIGHT_DECAY = {"sgd": 5e-4, "adamw": 0.05}
UNSHARDED_ONLY = ("adafactor", "rprop")
"""Optimizers that cannot step sharded weights (torch 2.13)."""
DEFAULT_WARMUP = {"onecycle": 0.3}
PLATEAU_EPOCHS = 3
EXPENSIVE_OPERATORS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "scaled_dot_product",
    "flash_attention",
    "efficient_attention",
)


class Checkpoints(Settings):
    """When training writes checkpoints, from which it resumes after an interruption.

    There is one after every epoch. None of these settings changes the trained weights.
    """

    every_steps: Count | None = None
    """Steps between further checkpoints within an epoch; by default there are none."""
    keep: Count = 2
    """Number of newest checkpoints to keep, besides that of the best epoch."""
    asynchronous: bool = True
    """Whether checkpoints are written while training continues, from a copy in main memory."""


class Training(Settings):
    """How weights are trained; `epochs` alone is enough."""

    epochs: Count
    """Passes over the `train` split."""
    batch_size: Count = 64
    """Samples per step, over all processes together. An incomplete last batch is left out."""
    accumulate: Count = 1
    """Micro-batches into which each process divides its share of a step, to accumulate their
    gradients: less memory, the same step."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of forward and backward passes; weights stay fp32. `fp16`, with a scaled loss, is
    for CUDA alone."""
    activation_checkpointing: Literal["none", "full", "selective"] | Count = "none"
    """Blocks whose activations are recomputed in the backward pass: `full` is all of them, a number
    n every n-th; with `selective` all save the results of expensive operators and recompute the
    rest."""
    activation_blocks: tuple[str, ...] = ()
    """Class names of the blocks for activation checkpointing and `compile`; by default the model's
    repeated blocks."""
    activation_operators: tuple[str, ...] = EXPENSIVE_OPERATORS
    """Prefixes of the names, in torch.ops.aten, of the operators whose results `selective`
    saves."""
    compile: Literal["none", "blocks", "whole"] = "none"
    """What torch.compile compiles, in some minutes at the start: the `blocks`, where equal ones are
    compiled once, or the `whole` model. Needs a C++ compiler."""
    optimizer: Literal[
        "adadelta",
        "adafactor",
        "adagrad",
        "adam",
        "adamax",
        "adamw",
        "asgd",
        "nadam",
        "radam",
        "rmsprop",
        "rprop",
        "sgd",
    ] = "sgd"
    """An optimizer of torch.optim; `sgd` has momentum. The fused variant is used if possible."""
    optimizer_arguments: dict[str, JsonValue] = {}
    """Further arguments of the optimizer, such as `betas` or `eps`."""
    learning_rate: Positive | None = None
    """Highest learning rate; by default 0.1 for `sgd`, 0.002 for `adamw`, and torch's own for the
    others."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of `sgd`."""
    nesterov: bool = True
    """Whether the momentum of `sgd` is Nesterov's."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Decay of matrices and kernels; by default 0.0005 for `sgd`, 0.05 for `adamw`, else 0."""
    schedule: Literal["onecycle", "cosine", "constant", "step", "plateau"] = "onecycle"
    """Learning rate over time: `onecycle` rises, then falls; `cosine` falls; `constant` stays;
    `step` falls every `schedule_epochs`; `plateau` when the metric on `val` stops improving."""
    warmup: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of all steps for the warm-up; by default 0.3 for `onecycle`, 0 for the others."""
    schedule_epochs: Count | None = None
    """Epochs between reductions of `step` (by default a third of all), or without improvement
    before one of `plateau` (by default 3)."""
    schedule_factor: Ratio = 0.1
    """What `step` and `plateau` multiply the learning rate by."""
    ema_decay: Ratio | None = None
    """Decay of an exponential moving average of the weights, which is then evaluated and saved."""
    label_smoothing: Fraction | None = None
    """Share of the target that is spread over all classes, for the loss `cross_entropy`; by default
    0.1."""
    class_weights: tuple[Positive, ...] | None = None
    """Weight of each class, for the losses `cross_entropy` and `nll`; 1 is neutral."""
    clip_norm: Positive | None = None
    """Maximum global norm of the gradient; no limit by default."""
    on_nan: Literal["stop", "skip"] = "stop"
    """Whether a loss that is not finite stops the training, or its step is skipped."""
    early_stopping: Count | None = None
    """Epochs without improvement on `val` after which training ends; never by default."""
    keep: Literal["best", "last"] = "best"
    """Which weights are kept: those `best` by the metric on `val`, or the `last`."""
    # Excluded from dumps, and so from cache keys: these change no result.
    checkpoints: Annotated[Checkpoints, Field(exclude=True)] = Checkpoints()
    """When checkpoints are written, from which an interrupted training resumes."""
    parallel: Parallel = Parallel()
    """How training is distributed over processes."""
    profile: Annotated[Profile, Field(exclude=True)] = Profile()
    """What is recorded of a training; the result stays the same."""

    @field_validator("optimizer", mode="before")
    @classmethod
    def _known_optimizer(cls, name: object) -> object:
        known = DEFAULT_LEARNING_RATE
        if not isinstance(name, str) or name.lower() in known:
            return name.lower() if isinstance(name, str) else name
        near = difflib.get_close_matches(name.lower(), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise ValueError(f"unknown optimizer {name!r}; {hint}")

    @model_validator(mode="after")
    def _batch_divides(self) -> Self:
        ranks, parts = self.parallel.replicas, self.parallel.replicas * self.accumulate
        if self.batch_size % parts:
            below = self.batch_size - self.batch_size % parts
            cut = f" in {self.accumulate} parts each" if self.accumulate > 1 else ""
            raise ValueError(
                f"batch_size {self.batch_size} does not divide over {ranks} processes{cut}; "
                f"use {f'{below} or ' if below else ''}{below + parts}"
            )
        return self

    @model_validator(mode="after")
    def _gradients_can_be_remembered(self) -> Self:
        communication = self.parallel.communication
        if communication not in ("powersgd", "topk", "int8"):
            return self
        if self.precision == "fp16":
            raise ValueError(
                f"communication: {communication} remembers gradients, which "
                "precision: fp16 scales differently from step to step; use bf16"
            )
        if self.on_nan == "skip":
            raise ValueError(
                f"communication: {communication} remembers gradients, those of a step that "
                "on_nan: skip leaves out among them; use fp16, bf16 or none"
            )
        return self

    @model_validator(mode="after")
    def _operators_are_for_selective(self) -> Self:
        chosen = self.activation_operators != EXPENSIVE_OPERATORS
        if chosen and self.activation_checkpointing != "selective":
            raise ValueError(
                "activation_operators is for activation_checkpointing: selective, found "
                f"{self.activation_checkpointing}"
            )
        return self

    @model_validator(mode="after")
    def _goes_with_a_mesh(self) -> Self:
        pipeline = self.parallel.pipeline
        if self.precision == "fp16" and self.parallel.is_mesh:
            raise ValueError("precision: fp16 does not go with tensor or pipeline; use bf16")
        if pipeline is None:
            return self
        if self.compile != "none":
            raise ValueError("compile does not go with pipeline; leave it out")
        if self.accumulate > 1:
            raise ValueError(
                "accumulate does not go with pipeline, whose microbatches do the same; "
                "leave it out and raise pipeline.microbatches"
            )
        parts = self.parallel.replicas * pipeline.microbatches
        if self.batch_size % parts:
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into {pipeline.microbatches} "
                f"micro-batches for each of {self.parallel.replicas} replicas; use a multiple of "
                f"{parts}"
            )
        return self

    @model_validator(mode="after")
    def _engine_can(self) -> Self:
        cannot = {
            "precision: fp16": self.precision == "fp16",
            "on_nan: skip": self.on_nan == "skip",
            "ema_decay": self.ema_decay is not None,
        }
        unsupported = next((name for name, is_set in cannot.items() if is_set), None)
        if self.parallel.strategy == "deepspeed" and unsupported:
            raise ValueError(
                f"strategy: deepspeed has no {unsupported} here; use fsdp, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _optimizer_is_whole(self) -> Self:
        for argument, name in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
            if argument in self.optimizer_arguments:
                raise ValueError(f"optimizer_arguments: {argument} is set by {name}; use that")
        sharded = self.parallel.sharding_mode is not None or self.parallel.tensor > 1
        if sharded and self.optimizer in UNSHARDED_ONLY:
            raise ValueError(
                f"optimizer: {self.optimizer} needs whole weights, which {self.parallel.strategy} "
                "or tensor cut; use strategy: zero1, or another optimizer"
            )
        if self.optimizer == "rprop" and self.weight_decay:
            raise ValueError("rprop has no weight_decay; leave it out")
        if self.optimizer == "sgd" and self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0; set nesterov: false")
        return self

    @property
    def peak_learning_rate(self) -> float:
        """The highest learning rate, with the optimizer's default."""
        return self.learning_rate or DEFAULT_LEARNING_RATE[self.optimizer]

    @property
    def weight_decay_or_default(self) -> float:
        """The weight decay, with the optimizer's default."""
        if self.weight_decay is None:
            return DEFAULT_WEIGHT_DECAY.get(self.optimizer, 0.0)
        return self.weight_decay

    @property
    def warmup_share(self) -> float:
        """Share of all steps for the warm-up, with the schedule's default."""
        return DEFAULT_WARMUP.get(self.schedule, 0.0) if self.warmup is None else self.warmup

    @property
    def epochs_per_reduction(self) -> int:
        """Epochs between reductions of the learning rate, or without improvement before one."""
        default = PLATEAU_EPOCHS if self.schedule == "plateau" else max(1, self.epochs // 3)
        return self.schedule_epochs or default

    @property
    def needs_val(self) -> str | None:
        """The setting that needs a split `val`; None if no setting does."""
        needs = {
            "keep: best": self.keep == "best",
            "schedule: plateau": self.schedule == "plateau",
            "early_stopping": self.early_stopping is not None,
        }
        return next((name for name, needed in needs.items() if needed), None)

    def check_targets_loss(self, loss: Loss) -> None:
        """Refuse class weights and label smoothing where the loss has none.

        Raises:
            PipelineInvalid: they are set.
        """
        refuse_class_settings(str(loss.name), self.class_weights, self.label_smoothing)

    def hyper_parameters(self) -> Training:
        """Return these settings alone, without what a stage adds to them."""
        return Training.model_validate(
            {name: getattr(self, name) for name in Training.model_fields}
        )
