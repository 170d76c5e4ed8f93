"""Hyper-parameters of training, fine-tuning and distillation, and what they need of the data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, Field, JsonValue, model_validator

from compress.common.config import Count, Fraction, Positive, Ratio, Settings, Unmet
from compress.common.errors import PipelineInvalid, Unavailable
from compress.common.factories import NameOrReference, Reference
from compress.common.requirements import COMPILER, Requirement, pip_install
from compress.core.objectives.loss import Loss, refuse_class_settings
from compress.core.validation_errors import did_you_mean
from compress.training.config.parallel import Parallel

if TYPE_CHECKING:
    from compress.core.context import Context
    from compress.data.splits import Splits

TRACKER_REQUIREMENTS = {
    "tensorboard": Requirement(what="tensorboard", install=pip_install("tensorboard")),
    "mlflow": Requirement(what="mlflow", install=pip_install("mlflow")),
}


class Trace(Settings):
    """Which steps torch.profiler records, as `torch.profiler.schedule` counts them, and what."""

    wait: Annotated[int, Field(ge=0)] = 1
    """Steps at the start that are not recorded."""
    warmup: Count = 1
    """Steps after them in which the profiler runs and its records are dropped."""
    active: Count = 3
    """Steps that are recorded."""
    memory: bool = False
    """Whether each operator's allocations are recorded."""
    shapes: bool = False
    """Whether the shapes of each operator's inputs are recorded."""
    stack: bool = False
    """Whether the Python source line of each operator is recorded; slow."""


class Profile(Settings):
    """What is recorded of a training; the result stays the same.

    A stage whose artifact comes from the cache is not trained, and nothing is recorded: run it
    again with `--from`.
    """

    trace: bool | Count | Trace = False
    """Steps recorded by torch.profiler, after one skipped and one warm-up step; `true` is 3, and
    a mapping sets more. Each process writes `profiles/<stage>/trace-rank0.json` beside the report,
    to be opened in Perfetto, or in Chrome at chrome://tracing; the report lists the operators that
    took most time."""
    memory: bool = False
    """Whether CUDA allocations are recorded, in `profiles/<stage>/memory-rank0.pickle`; it opens at
    pytorch.org/memory_viz."""
    log_every: Count | None = None
    """Steps between reports of loss, learning rate, gradient norm and throughput to console, log
    and tracker; by default each epoch is reported alone."""
    peak_flops: Positive | None = None
    """Peak floating-point operations per second of each process's device, for the model FLOPs
    utilization (MFU) of `log_every`; by default known for some GPUs with `bf16` or `fp16`."""
    tracker: Literal["none", "tensorboard", "mlflow"] = "none"
    """Where loss, metric, learning rate, speed and memory of each epoch are written, and the steps
    of `log_every`."""
    tracking_uri: str | None = None
    """Folder of `tensorboard`, or folder or address of `mlflow`; a folder is relative to that of
    the report, `tracking` by default."""

    @model_validator(mode="after")
    def _check_partners(self) -> Self:
        if self.tracking_uri is not None and self.tracker == "none":
            raise ValueError("tracking_uri is for tracker: tensorboard or mlflow; set one")
        if self.peak_flops is not None and self.log_every is None:
            raise ValueError("peak_flops is for the MFU of log_every; set log_every, such as 10")
        return self

    @property
    def trace_settings(self) -> Trace | None:
        """Which steps are traced, and how; None without a trace."""
        if isinstance(self.trace, Trace) or not self.trace:
            return self.trace or None
        return Trace() if self.trace is True else Trace(active=self.trace)

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """Packages that the tracker needs."""
        return () if self.tracker == "none" else (TRACKER_REQUIREMENTS[self.tracker],)


class Callbacks(Settings):
    """Functions of the user's that training calls, in the process that started it."""

    on_step_end: Reference | None = None
    """`module:callable`, called with a mapping after each optimizer step: `step` from 1, `epoch`,
    `loss`, `learning_rate`, `gradient_norm`, `samples_per_second` and more."""
    on_epoch_end: Reference | None = None
    """`module:callable`, called with a mapping after each epoch: `epoch` from 1, `loss`, `metric`,
    `learning_rate`, `samples_per_second` and more."""


# Those of torch.optim but LBFGS (wants a closure) and SparseAdam (wants sparse gradients). The
# rates are torch's own defaults, except those of sgd, adamw and muon, which are 0.001 there.
DEFAULT_LEARNING_RATE = {
    "adadelta": 1.0,
    "adafactor": 1e-2,
    "adagrad": 1e-2,
    "adam": 1e-3,
    "adamax": 2e-3,
    "adamw": 2e-3,
    "asgd": 1e-2,
    "muon": 2e-3,
    "nadam": 2e-3,
    "radam": 1e-3,
    "rmsprop": 1e-2,
    "rprop": 1e-2,
    "sgd": 0.1,
}


def _known_optimizer(name: str) -> str:
    if name.lower() in DEFAULT_LEARNING_RATE:
        return name.lower()
    hint = did_you_mean(name.lower(), DEFAULT_LEARNING_RATE)
    raise ValueError(f"unknown optimizer {name!r}; {hint}")


Optimizer = Annotated[
    str,
    AfterValidator(_known_optimizer),
    Field(json_schema_extra={"enum": [*DEFAULT_LEARNING_RATE]}),
]
"""Name of an optimizer, in any case."""
DEFAULT_WEIGHT_DECAY = {"sgd": 5e-4, "adamw": 0.05, "muon": 0.05}
UNSHARDED_ONLY = ("adafactor", "rprop")  # optimizers that cannot step sharded weights (torch 2.13)
SCHEDULES = (
    "onecycle",
    "cosine",
    "cosine_restarts",
    "linear",
    "polynomial",
    "constant",
    "step",
    "plateau",
)
SCHEDULE_SETTINGS = {
    "schedule_power": ("polynomial",),
    "min_learning_rate": ("cosine", "cosine_restarts", "linear", "plateau"),
}
"""Schedules that a setting is for; it is refused with any other."""


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


class ActivationSegments(Settings):
    """Activation checkpointing by segments of consecutive blocks."""

    segments: Annotated[int, Field(ge=2)] | Literal["auto"] = "auto"
    """Number of segments into which each list of blocks is divided; only their inputs are saved.
    The last one is not recomputed. `auto` is the square root of the number of blocks."""


class Compilation(Settings):
    """Options of torch.compile."""

    what: Literal["blocks", "whole"] = "blocks"
    """What is compiled: the `blocks`, where equal ones are compiled once, or the `whole` model."""
    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """torch.compile's mode: `reduce-overhead` uses CUDA graphs, `max-autotune` measures kernels,
    too, and takes longest to compile."""
    fullgraph: bool = False
    """Whether code that cannot be compiled as one graph is an error."""
    dynamic: bool | None = None
    """Whether sizes are variables in what is compiled; by default after a second size was met."""


class Training(Settings):
    """How weights are trained; `epochs` alone is enough."""

    epochs: Count
    """Passes over the `train` split."""
    steps_per_epoch: Annotated[Count | None, Field(exclude_if=lambda value: value is None)] = None
    """Steps of an epoch, for a `train` split that is a stream: the next epoch reads on where this
    one ended, and the stream begins anew when it ends. By default an epoch is one pass over it,
    which takes a `__len__`."""
    batch_size: Count = 64
    """Samples per step, over all processes together. An incomplete last batch is left out."""
    accumulate: Count = 1
    """Micro-batches into which each process divides its share of a step, to accumulate their
    gradients: less memory, the same step."""
    precision: Literal["fp32", "bf16", "fp16", "bf16-true"] = "fp32"
    """Arithmetic of forward and backward passes; weights stay fp32. `fp16`, with a scaled loss, is
    for CUDA alone. With `bf16-true` weights, gradients and optimizer state are bf16, too, and
    `adamw` rounds new weights stochastically; BatchNorm stays fp32."""
    activation_checkpointing: Literal["none", "full", "selective"] | Count | ActivationSegments = (
        "none"
    )
    """Blocks whose activations are recomputed in the backward pass: `full` is all of them, one at a
    time, a number n every n-th; `{segments: auto}` several consecutive blocks at a time, which
    saves fewer inputs; with `selective` all save, within `activation_budget`, the results that cost
    most FLOPs (matrix products, convolutions, attention), and recompute the rest."""
    activation_blocks: tuple[str, ...] = ()
    """Class names of the blocks for activation checkpointing and `compile`; by default the model's
    repeated blocks."""
    activation_budget: Ratio = 0.5
    """Most bytes that `selective` keeps, as a share of those without checkpointing, which torch
    measures in the first call of each block; 0.5 recomputes little."""
    compile: Literal["none", "blocks", "whole"] | Compilation = "none"
    """What torch.compile compiles, in some minutes at the start: the `blocks`, where equal ones are
    compiled once, or the `whole` model; or this and further options. Needs a C++ compiler."""
    matmul_precision: Annotated[
        Literal["highest", "high", "medium"], Field(exclude_if=lambda value: value == "highest")
    ] = "highest"
    """Precision of fp32 matrix products in this training: `high` is TF32 on CUDA devices, `medium`
    bf16."""
    channels_last: Annotated[bool, Field(exclude_if=lambda value: not value)] = False
    """Whether weights and inputs of four dimensions (images) are laid out in memory with channels
    last, for which convolutions have faster kernels on CUDA (tensor cores) and on most CPUs.
    Results differ by rounding. A model that calls `view` on such tensors needs `reshape`."""
    optimizer: Optimizer = "sgd"
    """An optimizer of torch.optim; `sgd` has momentum. The fused variant is used if possible.
    `muon` steps matrices by Muon, and tables of embeddings, kernels and vectors by AdamW, with one
    learning rate (`adjust_lr_fn: match_rms_adamw`)."""
    optimizer_arguments: dict[str, JsonValue] = {}
    """Further arguments of the optimizer, such as `betas` or `eps`."""
    learning_rate: Positive | None = None
    """Highest learning rate; by default 0.1 for `sgd`, 0.002 for `adamw` and `muon`, torch's own
    for the others."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Momentum of `sgd`, by default 0.9. `onecycle` lowers the momentum (`betas[0]` of the Adam
    family) from 0.95 to 0.85 while the rate rises, and back, unless it is set here or in
    `optimizer_arguments`."""
    nesterov: bool = True
    """Whether the momentum of `sgd` is Nesterov's."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Decay of matrices and kernels; by default 0.0005 for `sgd`, 0.05 for `adamw` and
    `muon`, else 0."""
    schedule: Annotated[str, NameOrReference("schedule", lambda: SCHEDULES)] = "onecycle"
    """Learning rate over time, by torch's schedulers: `onecycle` rises, then falls; `cosine`,
    `linear` and `polynomial` fall; `cosine_restarts` falls again and again, in `schedule_epochs`
    each; `constant` stays; `step` falls every `schedule_epochs`; `plateau` when the metric on `val`
    stops improving. `module:callable` is called with the optimizer and the number of all steps, and
    returns an LRScheduler of torch, which is stepped after every step."""
    warmup: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of all steps for the warm-up; by default 0.3 for `onecycle`, 0 for the others."""
    schedule_epochs: Count | None = None
    """Epochs between reductions of `step` or restarts of `cosine_restarts` (by default a third of
    all), or without improvement before a reduction of `plateau` (by default 3)."""
    schedule_factor: Ratio = 0.1
    """What `step` and `plateau` multiply the learning rate by."""
    schedule_power: Positive = 1.0
    """Exponent of `polynomial`; 1 falls as `linear`."""
    min_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """What `cosine`, `cosine_restarts`, `linear` and `plateau` fall to."""
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
    """Whether a loss, or a gradient whose norm is known, that is not finite stops the training, or
    its step is skipped."""
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
    callbacks: Annotated[Callbacks | Reference, Field(exclude=True)] = Callbacks()
    """Functions to call after steps and epochs, or `module:Class` with methods of these names. They
    get numbers and not the model, so that they change no result and are part of no cache key."""

    @model_validator(mode="after")
    def _check_parallel(self) -> Self:
        ranks, parts = self.parallel.replicas, self.parallel.replicas * self.accumulate
        if self.batch_size % parts:
            below = self.batch_size - self.batch_size % parts
            cut = f" in {self.accumulate} parts each" if self.accumulate > 1 else ""
            raise ValueError(
                f"batch_size {self.batch_size} does not divide over {ranks} processes{cut}; "
                f"use {f'{below} or ' if below else ''}{below + parts}"
            )
        communication = self.parallel.communication
        has_residuals = communication in ("powersgd", "topk", "int8")
        if has_residuals and self.precision == "fp16":
            raise ValueError(
                f"communication: {communication} remembers gradients, which "
                "precision: fp16 scales differently from step to step; use bf16"
            )
        if has_residuals and self.on_nan == "skip":
            raise ValueError(
                f"communication: {communication} remembers gradients, those of a step that "
                "on_nan: skip leaves out among them; use fp16, bf16 or none"
            )
        # FSDP refuses weights that are not contiguous (torch 2.13), DeepSpeed copies them to flat
        # buffers, and DTensor and pipeline stages send contiguous tensors.
        if self.channels_last and self.parallel.divides_weights:
            raise ValueError(
                "channels_last is for strategy: ddp, zero1 or dp without tensor and pipeline; "
                f"found {self.parallel.layout}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_activation_checkpointing(self) -> Self:
        takers = {"activation_budget": ("selective",)}
        self.refuse_settings_of_others("activation_checkpointing", takers)
        if not isinstance(self.activation_checkpointing, ActivationSegments):
            return self
        parallel = self.parallel
        # FSDP, DeepSpeed and pipeline stages prepare the weights of a block when it is called.
        at_call = parallel.sharding_mode or parallel.strategy == "deepspeed" or parallel.pipeline
        if at_call or self.compile != "none":
            found = parallel.layout if at_call else f"compile: {self.compiled_part}"
            raise ValueError(
                "activation_checkpointing: segments runs several blocks in one call, for "
                "strategy: ddp or zero1 without pipeline and compile; "
                f"found {found}; use full or selective"
            )
        return self

    @model_validator(mode="after")
    def _check_mesh(self) -> Self:
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
        if pipeline.splits_backward and self.activation_checkpointing != "none":
            raise ValueError(
                f"activation_checkpointing does not go with pipeline.schedule {pipeline.schedule}, "
                "which goes back through a block twice; leave it out or use another schedule"
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
    def _check_deepspeed(self) -> Self:
        cuts, clips = self.parallel.zero_stage > 0, self.clip_norm is not None
        cannot = {
            # DeepSpeed (0.19) clips gradients that are still scaled, but in stage 0.
            "clip_norm with precision: fp16 and zero_stage 1 or more": (
                self.precision == "fp16" and clips and cuts
            ),
            # It steps flat parts of weights there, of which Muon cannot make matrices.
            "optimizer: muon with zero_stage 1 or more": self.optimizer == "muon" and cuts,
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
    def _check_bf16_true(self) -> Self:
        if self.precision != "bf16-true":
            return self
        parallel = self.parallel
        unsupported = {
            # torchao, whose optimizer rounds, has no other one that keeps its state in bf16.
            f"optimizer: {self.optimizer}": self.optimizer != "adamw",
            "ema_decay": self.ema_decay is not None,  # its small changes would be rounded away
            f"strategy: {parallel.strategy}": parallel.strategy != "ddp",
            "tensor or pipeline": parallel.is_mesh,
            f"communication: {parallel.communication}": parallel.communication != "none",
        }
        if found := next((name for name, is_set in unsupported.items() if is_set), None):
            raise ValueError(
                f"precision: bf16-true is for optimizer: adamw and strategy: ddp, found {found}; "
                "leave it out, or use precision: bf16"
            )
        return self

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
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
        if self.optimizer == "sgd" and self.nesterov and not self.momentum_or_default:
            raise ValueError("nesterov needs a momentum above 0; set nesterov: false")
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        self.refuse_settings_of_others("schedule", SCHEDULE_SETTINGS)
        if self.has_custom_schedule and self.warmup is not None:
            raise ValueError(f"warmup is decided by schedule: {self.schedule}; leave it out")
        if self.min_learning_rate >= self.peak_learning_rate:
            raise ValueError(
                f"min_learning_rate {self.min_learning_rate:g} is not below the learning_rate "
                f"{self.peak_learning_rate:g}; lower it"
            )
        return self

    @property
    def has_custom_schedule(self) -> bool:
        """Whether the schedule is the user's own ``module:callable``."""
        return ":" in self.schedule

    @property
    def compiled_part(self) -> Literal["none", "blocks", "whole"]:
        """What is compiled, without the options."""
        return self.compile.what if isinstance(self.compile, Compilation) else self.compile

    @property
    def gathers_rounded(self) -> bool:
        """Whether FSDP gathers weights in the type of `precision`, rounded from fp32."""
        is_sharded = self.parallel.sharding_mode is not None
        return is_sharded and self.precision != "fp32" and self.parallel.param_dtype != "fp32"

    def for_nodes(self, started: int) -> Training:
        """Return the settings for the machines that were started, as many of them as fit.

        Only `parallel.min_nodes` allows another number of machines than `parallel.nodes`. The
        samples of a step are the same for any number.
        """
        parallel = self.parallel
        if parallel.min_nodes is None or started == parallel.nodes:
            return self
        for nodes in range(min(started, parallel.nodes), parallel.min_nodes - 1, -1):
            with suppress(ValueError):  # batch_size does not divide, say
                fewer = {**dict(parallel), "nodes": nodes, "min_nodes": None}
                return Training.model_validate({**dict(self), "parallel": fewer})
        raise PipelineInvalid(
            f"parallel: {started} machines were started, and batch_size {self.batch_size} with the "
            f"other settings fits no number of them from min_nodes: {parallel.min_nodes} on"
        )

    @property
    def peak_learning_rate(self) -> float:
        """The highest learning rate, with the optimizer's default."""
        return self.learning_rate or DEFAULT_LEARNING_RATE[self.optimizer]

    @property
    def momentum_or_default(self) -> float:
        """The momentum of `sgd`."""
        return 0.9 if self.momentum is None else self.momentum

    @property
    def weight_decay_or_default(self) -> float:
        """The weight decay, with the optimizer's default."""
        if self.weight_decay is None:
            return DEFAULT_WEIGHT_DECAY.get(self.optimizer, 0.0)
        return self.weight_decay

    @property
    def warmup_share(self) -> float:
        """Share of all steps for the warm-up, with the schedule's default."""
        if self.warmup is None:
            return 0.3 if self.schedule == "onecycle" else 0.0  # as torch's OneCycleLR
        return self.warmup

    @property
    def epochs_per_reduction(self) -> int:
        """Epochs between reductions of the learning rate, or without improvement before one."""
        default = 3 if self.schedule == "plateau" else max(1, self.epochs // 3)
        return self.schedule_epochs or default

    def unmet_by(self, context: Context) -> Iterator[Unmet]:
        """Yield what the training lacks: a device, samples, or splits of the data."""
        yield from super().unmet_by(context)
        yield from unmet_by_machine(self, context.device)
        if context.data is not None:
            yield from unmet_by_data(self, context.data)

    def check_targets_loss(self, loss: Loss) -> None:
        """Raise PipelineInvalid for class weights and label smoothing that the loss has not."""
        refuse_class_settings(str(loss.name), self.class_weights, self.label_smoothing)

    def hyper_parameters(self) -> Training:
        """Return these settings alone, without what a stage adds to them."""
        return Training.model_validate(
            {name: getattr(self, name) for name in Training.model_fields}
        )


TRITON = Requirement(what="triton", install="pip install triton")
"""What TorchInductor generates CUDA kernels with."""


def unmet_by_machine(training: Training, device: str) -> Iterator[Unmet]:
    """Yield settings that need a compiler, or a CUDA device where the run is on another."""
    on_cuda = device.startswith("cuda")
    if training.compiled_part != "none":
        for need in (COMPILER, TRITON) if on_cuda else (COMPILER,):
            if need.missing():
                problem = f"{need.problem}, or set compile: none"
                yield Unmet(("compile",), problem, Unavailable, need.program)
    if on_cuda:
        return
    needs = f"needs a CUDA device and this is {device}"
    if training.precision == "fp16":
        mend = "use bf16 or fp32, or set `device: cuda` for the whole run where there is one"
        yield Unmet(("precision",), f"fp16 {needs}; {mend}", Unavailable)
    if training.profile.memory:
        problem = f"{needs}; leave it out, as the peak of each process is reported anyway"
        yield Unmet(("profile", "memory"), problem, Unavailable)


def unmet_by_data(training: Training, data: Splits) -> Iterator[Unmet]:
    """Yield splits that are not there, and settings that do not go with the number of samples."""
    size, steps, parallel = training.batch_size, training.steps_per_epoch, training.parallel
    found = ", ".join(map(repr, data.datasets))
    needs_val = {
        "keep: best": training.keep == "best",
        "schedule: plateau": training.schedule == "plateau",
        "early_stopping": training.early_stopping is not None,
    }
    setting = next((name for name, needed in needs_val.items() if needed), None)
    if setting and "val" not in data.datasets:
        key, _, value = setting.partition(": ")
        mend = "set keep: last" if key == "keep" else f"leave out {key}"
        problem = f"{value} needs a split 'val', and the data has {found}; add one"
        yield Unmet((key,), f"{problem.lstrip()}, or {mend}")
    if "train" not in data.datasets:
        yield Unmet((), f"trains on split 'train', and the data has {found}; add one")
        return
    if data.stream is not None:
        samples = data.stream.samples
        if not steps and samples is None:
            problem = "split 'train' is a stream without __len__; set steps_per_epoch"
            yield Unmet(("steps_per_epoch",), problem)
        elif not steps and samples is not None and samples < size:
            problem = (
                f"split 'train' is a stream of {samples} samples, expected at least a batch "
                f"of {size}; lower batch_size or set steps_per_epoch"
            )
            yield Unmet(("batch_size",), problem)
        return
    if steps:
        problem = "is for a stream, and split 'train' has a length; leave it out"
        yield Unmet(("steps_per_epoch",), problem)
    samples = len(data.split("train"))  # type: ignore[arg-type]  # Splits admits sized datasets only
    if samples < parallel.replicas:
        counts = f"split 'train' has {samples} samples for {parallel.replicas} processes"
        yield Unmet(("parallel",), f"{counts}; lower processes or nodes, or bring more data")
    if parallel.pipeline and samples < size:
        counts = f"split 'train' has {samples} samples and a pipeline needs whole batches of {size}"
        yield Unmet(("batch_size",), f"{counts}; lower batch_size")
