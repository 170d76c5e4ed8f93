"""Settings of distributed training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from compress.common.config import Count, Positive, Settings
from compress.common.requirements import Requirement, pip_install

# Settings of earlier versions, refused with what replaces them.
REMOVED = ("rendezvous", "rendezvous_seconds")
# 29400 is the default port of torchrun's c10d rendezvous.
TORCHRUN = (
    "torchrun --nnodes {nodes} --nproc-per-node {processes} --rdzv-backend c10d "
    "--rdzv-endpoint HOST:29400 --no-python compress run PIPELINE.YAML --out DIR"
)
"""How a run on several machines is started, on each of them."""
ZERO = {"zero2": "shard_grad_op", "zero3": "full_shard"}
REPLICATED = ("ddp", "zero1")
SHARDED = ("fsdp", *ZERO)
IN_ROUNDS = ("interleaved_1f1b", "interleaved_zero_bubble")
"""Schedules that take as many micro-batches at a time as there are stages."""
ONLY_FOR = {
    "bucket_mebibytes": REPLICATED,
    "buffer_dtype": SHARDED,
    "communication": REPLICATED,
    "cpu_offload": (*SHARDED, "deepspeed"),
    "find_unused_parameters": REPLICATED,
    "gradient_as_bucket_view": REPLICATED,
    "deepspeed_config": ("deepspeed",),
    "param_dtype": SHARDED,
    "prefetch": SHARDED,
    "reduce_dtype": SHARDED,
    "sharding": SHARDED,
    "static_graph": REPLICATED,
    "wrap": SHARDED,
    "zero_stage": ("deepspeed",),
}
"""Strategies that a setting is for; it is refused with any other."""

ONLY_FOR_COMMUNICATION = {
    "group_processes": ("hierarchical",),
    "int8_rounding": ("int8",),
    "powersgd_rank": ("powersgd",),
    "topk_fraction": ("topk",),
}
"""The value of `communication` that a setting is for; it is refused with any other."""

DEEPSPEED_OWNED = {
    "train_batch_size": "batch_size",
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "accumulate",
    "gradient_clipping": "clip_norm",
    "optimizer": "optimizer",
    "scheduler": "schedule and warmup (WarmupLR is schedule: constant with a warmup)",
    "fp16": "precision",
    "bf16": "precision",
    "amp": "precision",
    "torch_autocast": "precision",
    "zero_optimization.stage": "parallel.zero_stage",
}
"""Keys of DeepSpeed's configuration, and the settings here that decide them."""

DEEPSPEED = Requirement(
    what="deepspeed", install=f"{pip_install('deepspeed')}, or use zero1 to zero3"
)


class Prefetch(Settings):
    """How many blocks FSDP gathers ahead, by the direction; torch decides where none is given."""

    forward: Count | None = None
    """Blocks in the order of the model; without it the next one is gathered once this one ends."""
    backward: Count | None = None
    """Blocks in the reverse order; without it the next one is gathered meanwhile."""


class PipelineParallel(Settings):
    """How a model is divided into stages, through which micro-batches flow."""

    stages: Annotated[int, Field(ge=2)] = 2
    """Number of stages; each is one process for every share of the batch."""
    schedule: Literal[
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "looped_bfs",
        "interleaved_zero_bubble",
        "zbv_zero_bubble",
    ] = "1f1b"
    """Order of forward and backward passes: all forward ones first (`gpipe`), or alternating, which
    keeps fewer activations (`1f1b`). The others have two parts of the model in each process, wait
    less and send more: `looped_bfs` is `gpipe` with them, and `interleaved_1f1b` is `1f1b`.
    `interleaved_zero_bubble` and `zbv_zero_bubble` also compute the gradients of weights apart from
    those of activations, in the time when a process would wait; with the latter the first process
    has the first and the last part."""
    microbatches: Count = 4
    """Micro-batches into which each share of a batch is divided."""
    split: tuple[str, ...] = ()
    """Names of the modules with which the parts after the first start; by default repeated blocks
    are divided evenly."""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.split and len(self.split) != self.parts - 1:
            raise ValueError(
                f"pipeline.split has {len(self.split)} names and {self.parts} parts have "
                f"{self.parts - 1} beginnings besides the model's own"
            )
        rounds = max(1, self.microbatches // self.stages)
        if self.schedule == "1f1b" and self.microbatches < self.stages:
            raise ValueError(
                f"pipeline.schedule 1f1b needs a micro-batch for each of {self.stages} stages, "
                f"found microbatches: {self.microbatches}"
            )
        if self.schedule in IN_ROUNDS and self.microbatches % rounds:
            raise ValueError(
                f"pipeline.schedule {self.schedule} takes micro-batches in rounds of "
                f"{self.stages}, found microbatches: {self.microbatches}; use a multiple"
            )
        return self

    @property
    def parts(self) -> int:
        """The parts into which the model is divided: one or two for each stage."""
        return self.stages * (1 if self.schedule in ("gpipe", "1f1b") else 2)

    def stage_of(self, part: int) -> int:
        """Return the stage that has a part."""
        if self.schedule == "zbv_zero_bubble":  # in the shape of a V: there and back
            return min(part, self.parts - 1 - part)
        return part % self.stages

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are computed apart from those of activations."""
        return self.schedule.endswith("zero_bubble")


class Parallel(Settings):
    """How training is distributed over processes."""

    strategy: Literal["ddp", "fsdp", "zero1", "zero2", "zero3", "deepspeed", "dp"] = "ddp"
    """`ddp`: every process holds the whole model and its share of each batch. `fsdp`: weights,
    gradients and optimizer state are sharded. `zero1`: `ddp` with sharded optimizer state. `zero2`
    and `zero3`: `fsdp` with `shard_grad_op` and `full_shard`. `deepspeed`: DeepSpeed's engine, an
    extra. `dp`: DataParallel, by threads of one process, over all visible CUDA devices; with one or
    none the result is that of one process."""
    processes: Count = 1
    """Number of processes on each machine; 1 trains in the calling process."""
    nodes: Count = 1
    """Number of machines. torchrun or srun starts the same `compress run` on each; rank 0 runs the
    pipeline, and the others take part in its trainings. They share the folders of the run."""
    min_nodes: Annotated[Count | None, Field(exclude=True)] = None
    """Fewest machines with which trainings go on under torchrun's elastic `--nnodes MIN:MAX`, from
    the last checkpoint. Of those started, the most over which `batch_size` divides take part; the
    others wait. By default all of `nodes` are needed."""
    restarts: Annotated[int, Field(ge=0, exclude=True)] = 3
    """How often the processes are started again from the last checkpoint when one was killed; any
    other error ends the training at once."""
    tensor: Count = 1
    """Processes that share the matrices of each block (tensor parallelism); each reads its slices.
    What all of them compute, dropout included, stays identical; inside divided attention and
    feed-forward layers all slices have the same dropout mask."""
    tensor_plan: dict[str, Literal["column", "row"]] = {}
    """How linear layers are split, by patterns of their names (`*.mlp.up: column`): by outputs
    (`column`) or by inputs (`row`), so that a block starts with columns and ends with rows. By
    default attention and feed-forward layers are recognized by conventional names."""
    pipeline: PipelineParallel | None = None
    """How the model's blocks are divided over processes (pipeline parallelism); off by default.
    With `fsdp`, gradients are exchanged after each micro-batch."""
    communication: Literal["none", "fp16", "bf16", "powersgd", "topk", "int8", "hierarchical"] = (
        "none"
    )
    """How gradients are compressed between processes: not at all (`none`), to 16 bits (`fp16`,
    `bf16`), to int8 (`int8`), to a product of two thin matrices (`powersgd`), or to their largest
    entries (`topk`). The last three add to each gradient the compression error of the previous
    one. `hierarchical` does not compress, but sends less between groups of processes."""
    group_processes: Count | None = None
    """Processes of a group of `hierarchical`; by default those of a machine."""
    powersgd_rank: Count = 4
    """Columns of the matrices of `powersgd`."""
    topk_fraction: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Share of each gradient's entries that `topk` sends."""
    int8_rounding: Annotated[
        Literal["nearest", "stochastic"], Field(exclude_if=lambda value: value == "nearest")
    ] = "nearest"
    """How `int8` rounds: to the `nearest` integer, or up or down at random, with probabilities that
    make the mean exact (`stochastic`)."""
    sync_batchnorm: bool = False
    """Whether BatchNorm normalizes by the samples of all processes, as one process would; by
    default by those of its own process. Costs two exchanges for each layer and step."""
    bucket_mebibytes: Positive | None = None
    """Size of the buckets of gradients that `ddp` all-reduces at once; by default 25, and 1 for the
    first one, so that sending begins early in the backward pass."""
    static_graph: bool = False
    """Whether every step of `ddp` uses the same weights, so that unused ones need not be searched.
    With more than two processes a resumed training may then differ in the last bit."""
    find_unused_parameters: Annotated[Literal["auto"] | bool, Field(exclude=True)] = "auto"
    """Whether `ddp` looks in every step for weights that the loss does not reach. With `auto` it
    does if several calls of the model with a few samples leave one out."""
    gradient_as_bucket_view: Annotated[bool, Field(exclude=True)] = True
    """Whether the gradients of `ddp` lie in the buckets that are sent, which saves a copy of them
    in memory and in time."""

    sharding: Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard"] | None = None
    """What `fsdp` shards: everything (`full_shard`, the default); all but the weights between
    forward and backward; nothing; everything within groups of processes, between which gradients
    are averaged."""
    shard_processes: Count | None = None
    """Processes of a group in `hybrid_shard`; by default those of a machine, or half of all on one
    machine."""
    wrap: tuple[str, ...] | Count = 1_000_000
    """What `fsdp` gathers at once: class names of blocks, or the minimum number of parameters of a
    block."""
    cpu_offload: bool = False
    """Whether `fsdp` keeps weights and optimizer state in main memory, and `deepspeed` optimizer
    state, and in stage 3 weights."""
    prefetch: Count | Prefetch | None = None
    """Blocks that `fsdp` gathers ahead of the present one, forward and backward, or apart as
    `{forward: 2, backward: 1}`; by default torch decides."""
    param_dtype: Literal["fp32"] | None = None
    """Type in which `fsdp` gathers weights; by default that of `precision`. With `fp32` they are
    gathered whole and rounded by each operator, as in `ddp`, and models are evaluated in fp32."""
    buffer_dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, Field(exclude_if=lambda value: value is None)
    ] = None
    """Type in which `fsdp` computes with buffers, such as tables of positions; by default that in
    which they are stored. Those of normalizations, and checkpoints, keep theirs."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which `fsdp` adds up gradients between processes; `bf16` sends half the bytes, and
    rounds."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """What `deepspeed` shards: nothing; optimizer state; gradients too; weights too."""
    deepspeed_config: dict[str, JsonValue] = {}
    """Further keys of DeepSpeed's configuration, such as `zero_optimization: {overlap_comm: true}`.
    Keys that other settings decide (batch sizes, precision, optimizer, ...) are refused."""

    @model_validator(mode="after")
    def _check_strategy(self) -> Self:
        self.refuse_settings_of_others("strategy", ONLY_FOR)
        self.refuse_settings_of_others("communication", ONLY_FOR_COMMUNICATION)
        if self.static_graph and self.find_unused_parameters is True:
            raise ValueError(
                "static_graph finds unused weights once, in the first step; leave out "
                "find_unused_parameters"
            )
        if self.communication != "none" and self.ranks == 1:
            raise ValueError(
                f"communication: {self.communication} is for several processes, found one"
            )
        if self.nodes > 1 and self.strategy == "dp":
            raise ValueError("strategy: dp runs as one process; use ddp for several nodes")
        engine = "strategy: deepspeed" if self.strategy == "deepspeed" else "pipeline"
        if self.sync_batchnorm and (self.strategy == "deepspeed" or self.pipeline):
            # A run with DeepSpeed 0.19.8 did not end, for unknown reasons; with pipeline none was.
            raise ValueError(f"sync_batchnorm does not go with {engine}; leave it out, or use ddp")
        if self.min_nodes and self.min_nodes > self.nodes:
            raise ValueError(
                f"min_nodes is for fewer machines than nodes: {self.nodes}, found "
                f"{self.min_nodes}; set nodes to the largest number"
            )
        if self.min_nodes and self.strategy == "deepspeed":
            raise ValueError(
                "min_nodes does not go with strategy: deepspeed, whose checkpoints fit one number "
                "of processes; use fsdp or zero1 to zero3"
            )
        if self.strategy == "deepspeed" and self.cpu_offload and self.zero_stage == 0:
            raise ValueError("cpu_offload needs zero_stage 1 or more, found 0")
        return self

    @model_validator(mode="after")
    def _check_deepspeed_config(self) -> Self:
        zero = self.deepspeed_config.get("zero_optimization", {})
        if not isinstance(zero, Mapping):
            raise ValueError(f"deepspeed_config: zero_optimization is a mapping, found {zero!r}")
        owned = dict(DEEPSPEED_OWNED)
        if self.cpu_offload:
            offloads = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
            owned |= dict.fromkeys(offloads, "parallel.cpu_offload")
        keys = [*self.deepspeed_config, *(f"zero_optimization.{key}" for key in zero)]
        if decided := [key for key in keys if key in owned]:
            raise ValueError(
                f"deepspeed_config: {decided[0]} is decided by {owned[decided[0]]}; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.sharding_mode != "hybrid_shard" and self.shard_processes:
            raise ValueError("shard_processes is for strategy: fsdp with sharding: hybrid_shard")
        if self.sharding_mode == "hybrid_shard" and self.ranks % self.shard_group:
            raise ValueError(
                f"hybrid_shard: groups of {self.shard_group} do not divide "
                f"{self.ranks} processes; set shard_processes to a divisor"
            )
        if self.strategy in ZERO and self.sharding:
            raise ValueError(f"{self.strategy} says what is sharded; leave out sharding")
        group = self.communication_group
        divides = group not in (1, self.ranks) and self.ranks % group == 0
        if self.communication == "hierarchical" and not divides:
            raise ValueError(
                f"communication: hierarchical needs groups of 2 processes or more, two or more of "
                f"them, and found {self.ranks} processes in groups of {group}; "
                "set nodes, or group_processes to a divisor"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _refuse_removed(cls, settings: Any) -> Any:
        if isinstance(settings, Mapping) and (found := [n for n in REMOVED if n in settings]):
            raise ValueError(
                f"{found[0]} was removed, as torchrun and srun say where machines meet; leave it "
                f"out and run on every machine: {TORCHRUN.format(nodes='N', processes='G')}"
            )
        return settings

    @model_validator(mode="after")
    def _check_mesh(self) -> Self:
        if self.tensor_plan and self.tensor == 1:
            raise ValueError("tensor_plan is for tensor above 1; set tensor: 2, say")
        if not self.is_mesh:
            return self
        if self.strategy not in ("ddp", "fsdp", *ZERO):
            raise ValueError(
                f"tensor and pipeline go with strategy: ddp, fsdp, zero2 or zero3, "
                f"found {self.strategy}"
            )
        if self.ranks % self.model_ranks:
            raise ValueError(
                f"{self.ranks} processes do not divide into groups of {self.model_ranks} "
                f"(tensor × pipeline.stages); use {self.model_ranks} or a multiple"
            )
        if self.sharding_mode in ("no_shard", "hybrid_shard"):
            raise ValueError(
                f"sharding: {self.sharding_mode} does not go with tensor or pipeline; "
                "use full_shard, shard_grad_op or strategy: ddp"
            )
        if self.pipeline and self.pipeline.splits_backward and self.sharding_mode:
            raise ValueError(
                f"pipeline.schedule {self.pipeline.schedule} computes gradients of weights that "
                f"strategy: {self.strategy} has freed by then; use ddp or another schedule"
            )
        for name in ("static_graph", "cpu_offload", "communication"):
            if not self.has_default(name):
                raise ValueError(f"{name} does not go with tensor or pipeline; leave it out")
        return self

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """Packages that these settings need."""
        return (DEEPSPEED,) if self.strategy == "deepspeed" else ()

    @property
    def undisturbed(self) -> bool:
        """Whether other nodes take part, in one training at a time."""
        return self.nodes > 1

    @property
    def in_process(self) -> bool:
        """Whether the calling process trains by itself, without a process group."""
        needs_group = self.sharding_mode is not None or self.strategy == "deepspeed"
        return self.ranks == 1 and not needs_group

    @property
    def is_mesh(self) -> bool:
        """Whether several processes share one model by tensor or pipeline parallelism."""
        return self.model_ranks > 1

    @property
    def divides_weights(self) -> bool:
        """Whether no process, or only DeepSpeed's engine, holds the model's own whole weights."""
        return bool(self.sharding_mode or self.is_mesh or self.strategy == "deepspeed")

    @property
    def model_ranks(self) -> int:
        """Processes that share one copy of the model."""
        return self.tensor * (self.pipeline.stages if self.pipeline else 1)

    @property
    def replicas(self) -> int:
        """Shares into which each batch is divided."""
        return self.ranks // self.model_ranks

    @property
    def sharding_mode(self) -> str | None:
        """What FSDP shards; None for strategies that do not shard the weights."""
        if self.strategy == "fsdp":
            return self.sharding or "full_shard"
        return ZERO.get(self.strategy)

    @property
    def layout(self) -> str:
        """How model and batch are divided; with another layout results differ by rounding."""
        shared = [f"{self.tensor} to a matrix"] if self.tensor > 1 else []
        shared += [f"{self.pipeline.stages} stages"] if self.pipeline else []
        how: list[str] = [self.strategy]
        how += [self.sharding_mode] if self.sharding_mode else []
        if self.communication == "powersgd":
            how.append(f"powersgd of rank {self.powersgd_rank}")
        elif self.int8_rounding == "stochastic":
            how.append("int8 by stochastic rounding")
        elif self.communication != "none":
            how.append(self.communication)
        how += [f"buffers in {self.buffer_dtype}"] if self.buffer_dtype else []
        how += ["gradients in bf16"] if self.reduce_dtype == "bf16" else []
        if self.sync_batchnorm and self.replicas > 1:
            how.append("synchronized BatchNorm")
        return ", ".join([f"{self.ranks} processes", *how, *shared])

    @property
    def ranks(self) -> int:
        """Training processes on all nodes together."""
        return self.ranks_per_node * self.nodes

    @property
    def ranks_per_node(self) -> int:
        """Training processes on each node; 1 for `dp`, which runs as one process."""
        return 1 if self.strategy == "dp" else self.processes

    @property
    def shard_group(self) -> int:
        """Processes of a group in `hybrid_shard`."""
        return self.shard_processes or (
            self.processes if self.nodes > 1 else max(1, self.processes // 2)
        )

    @property
    def communication_group(self) -> int:
        """Processes of a group in `hierarchical`."""
        return self.group_processes or self.processes


def nodes_of(settings: Settings) -> tuple[int, int]:
    """Return the fewest and the most machines that the trainings of a stage need."""
    parts = [part for _, part in settings.nested() if isinstance(part, Parallel)]
    fewest = max((part.min_nodes or part.nodes for part in parts), default=1)
    return fewest, max((part.nodes for part in parts), default=1)
