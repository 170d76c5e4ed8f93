"""Hyper-parameters shared by training, fine-tuning and distillation."""

from __future__ import annotations

import difflib
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from compress.core.settings import Fraction, Ratio, Settings

Positive = Annotated[float, Field(gt=0)]

Count = Annotated[int, Field(gt=0)]

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
DEFAULT_WARMUP = {"onecycle": 0.3}
PLATEAU_EPOCHS = 3
ZERO = {"zero2": "shard_grad_op", "zero3": "full_shard"}


class Parallel(Settings):
    """How training is spread over processes."""

    strategy: Literal["ddp", "fsdp", "zero1", "zero2", "zero3", "dp"] = "ddp"
    """`ddp`: every process holds the whole model and its share of each batch. `fsdp`: weights,
    gradients and optimizer state are sharded. `zero1`: `ddp` with sharded optimizer state. `zero2`
    and `zero3`: `fsdp` with `shard_grad_op` and `full_shard`. `dp`: accepted for DataParallel's
    sake, and run as one process."""
    processes: Count = 1
    """Number of processes on this machine; 1 trains in the calling process."""
    communication: Literal["none", "fp16", "bf16", "powersgd", "topk", "int8"] = "none"
    """How gradients are compressed on their way between processes: not at all (`none`), to 16 bits
    (`fp16`, `bf16`), to int8 (`int8`), to two thin matrices (`powersgd`), or to their largest
    entries (`topk`). The last three add to each gradient what was lost of the one before it."""
    powersgd_rank: Annotated[int, Field(gt=0)] = 4
    """Columns of the matrices of `powersgd`."""
    topk_fraction: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Share of each gradient's entries that `topk` sends."""
    bucket_mebibytes: Positive = 25.0
    """Gradients that `ddp` sends at once."""
    static_graph: bool = False
    """Whether each step of `ddp` uses the same weights, which spares looking for unused ones. With
    more than two processes a resumed training may then differ in the last bit."""

    sharding: Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard"] = "full_shard"
    """What `fsdp` shards: everything; all but the weights between forward and backward; nothing;
    everything within groups of processes, between which gradients are averaged."""
    shard_processes: Count | None = None
    """Processes of a group in `hybrid_shard`; by default half of all."""
    wrap: tuple[str, ...] | Count = 1_000_000
    """What `fsdp` gathers at once: class names of blocks, or their least number of weights."""
    cpu_offload: bool = False
    """Whether `fsdp` keeps weights and optimizer state in main memory."""

    @model_validator(mode="after")
    def _groups_divide(self) -> Self:
        group = self.shard_processes
        if self.sharding_mode != "hybrid_shard" and group:
            raise ValueError("shard_processes is for strategy: fsdp with sharding: hybrid_shard")
        if self.sharding_mode == "hybrid_shard" and self.processes % (
            group or max(1, self.processes // 2)
        ):
            raise ValueError(
                f"hybrid_shard: groups of {group or self.processes // 2} do not divide "
                f"{self.processes} processes; set shard_processes to a divisor"
            )
        if self.communication != "none" and self.strategy not in ("ddp", "zero1"):
            raise ValueError(
                f"communication: {self.communication} is for strategy: ddp or zero1, "
                f"found {self.strategy}"
            )
        if self.strategy in ZERO and "sharding" in self.model_fields_set:
            raise ValueError(f"{self.strategy} says what is sharded; leave out sharding")
        return self

    @property
    def sharding_mode(self) -> str | None:
        """What is sharded by FSDP; None for the strategies that keep the model whole."""
        return self.sharding if self.strategy == "fsdp" else ZERO.get(self.strategy)

    @property
    def ranks(self) -> int:
        """The processes that really train."""
        return 1 if self.strategy == "dp" else self.processes


class Training(Settings):
    """How weights are trained; `epochs` alone is enough."""

    epochs: Annotated[int, Field(gt=0)]
    """Passes over the `train` split."""
    batch_size: Annotated[int, Field(gt=0)] = 64
    """Samples per step, over all processes together. An incomplete last batch is left out."""
    accumulate: Count = 1
    """Parts into which each process cuts its share of a step, to add up their gradients: less
    memory, the same step."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of forward and backward passes; weights stay fp32. `fp16`, with a scaled loss, is
    for CUDA alone."""
    activation_checkpointing: Literal["none", "full"] | Count = "none"
    """Blocks that forget their activations and compute them again: all, or every n-th."""
    activation_blocks: tuple[str, ...] = ()
    """Class names of those blocks; by default the repeated ones of the model are found."""
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
    """An optimizer of torch.optim; `sgd` has momentum. The fused variant is used where it is."""
    optimizer_arguments: dict[str, JsonValue] = {}
    """Further arguments of the optimizer, `betas` or `eps` say."""
    learning_rate: Positive | None = None
    """Highest learning rate; by default 0.1 for `sgd`, 0.002 for `adamw`, and torch's own for the
    others."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of `sgd`."""
    nesterov: bool = True
    """Whether the momentum of `sgd` is Nesterov's."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Decay of matrices and kernels; by default 0.0005 for `sgd`, 0.05 for `adamw`, else none."""
    schedule: Literal["onecycle", "cosine", "constant", "step", "plateau"] = "onecycle"
    """Learning rate over time: `onecycle` rises, then falls; `cosine` falls; `constant` stays;
    `step` falls every `schedule_epochs`; `plateau` when the metric on `val` no longer gains."""
    warmup: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of the steps in which the learning rate rises; by default 0.3 for `onecycle`, 0 for the
    others."""
    schedule_epochs: Count | None = None
    """Epochs between the falls of `step` (by default a third of all), or without a gain before
    `plateau` falls (by default 3)."""
    schedule_factor: Ratio = 0.1
    """What `step` and `plateau` multiply the learning rate by."""
    ema_decay: Ratio | None = None
    """Decay of an exponential moving average of the weights, which is then evaluated and kept."""
    label_smoothing: Fraction = 0.1
    """Share of the target that is spread over all classes."""
    class_weights: tuple[Positive, ...] | None = None
    """Weight of each class in the cross-entropy; 1 is neutral."""
    clip_norm: Positive | None = None
    """Largest norm of the whole gradient; no limit by default."""
    on_nan: Literal["stop", "skip"] = "stop"
    """Whether a loss that is not finite stops the training, or its step is left out."""
    early_stopping: Count | None = None
    """Epochs without a gain on `val` after which training ends; never by default."""
    keep: Literal["best", "last"] = "best"
    """Which weights are kept: those `best` by the metric on `val`, or the `last`."""
    parallel: Parallel = Parallel()
    """How training is spread over processes."""

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
        ranks, parts = self.parallel.ranks, self.parallel.ranks * self.accumulate
        if self.batch_size % parts:
            below = self.batch_size - self.batch_size % parts
            cut = f" in {self.accumulate} parts each" if self.accumulate > 1 else ""
            raise ValueError(
                f"batch_size {self.batch_size} does not divide over {ranks} processes{cut}; "
                f"use {f'{below} or ' if below else ''}{below + parts}"
            )
        feedback = self.parallel.communication in ("powersgd", "topk", "int8")
        if feedback and self.precision == "fp16":
            raise ValueError(
                f"communication: {self.parallel.communication} remembers gradients, which "
                "precision: fp16 scales differently from step to step; use bf16"
            )
        return self

    @model_validator(mode="after")
    def _optimizer_is_whole(self) -> Self:
        if self.optimizer == "rprop" and self.weight_decay:
            raise ValueError("rprop has no weight_decay; leave it out")
        if self.optimizer == "sgd" and self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0; set nesterov: false")
        return self

    @property
    def peak_learning_rate(self) -> float:
        """The highest learning rate, the optimizer's default where none is set."""
        return self.learning_rate or DEFAULT_LEARNING_RATE[self.optimizer]

    @property
    def decay(self) -> float:
        """The weight decay, the optimizer's default where none is set."""
        if self.weight_decay is None:
            return DEFAULT_WEIGHT_DECAY.get(self.optimizer, 0.0)
        return self.weight_decay

    @property
    def rising_share(self) -> float:
        """Share of the steps in which the learning rate rises."""
        return DEFAULT_WARMUP.get(self.schedule, 0.0) if self.warmup is None else self.warmup

    @property
    def epochs_per_fall(self) -> int:
        """Epochs between two falls of the learning rate, or without a gain before one."""
        default = PLATEAU_EPOCHS if self.schedule == "plateau" else max(1, self.epochs // 3)
        return self.schedule_epochs or default

    @property
    def needs_val(self) -> str | None:
        """The setting that needs a split `val`, if one does."""
        needs = {
            "keep: best": self.keep == "best",
            "schedule: plateau": self.schedule == "plateau",
            "early_stopping": self.early_stopping is not None,
        }
        return next((name for name, needed in needs.items() if needed), None)

    def hyper_parameters(self) -> Training:
        """Return these settings alone, without what a stage adds to them."""
        return Training.model_validate(
            {name: getattr(self, name) for name in Training.model_fields}
        )
