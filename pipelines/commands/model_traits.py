"""Properties of a model and its data that decide what `compress init` proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from compress.common.forward import run_in_eval
from compress.core.metrics import metric_class
from compress.core.objectives.task import NO_METRIC, TASKS, TaskName, infer_task
from compress.data.infer_signature import refuse_one_answer, takes_rows
from compress.pipelines.config import model_spec
from compress.pipelines.planning.planner import task_of
from compress.training.config.training import Training

if TYPE_CHECKING:
    from torch import nn

    from compress.common.signature import Signature
    from compress.data.splits import Splits
    from compress.pipelines.config.pipeline import PipelineConfig

Family = Literal["convolutional", "linear", "other", "exported"]
CONVOLUTION_LAYERS = ("Conv1d", "Conv2d", "Conv3d")
PRODUCT_LAYERS = ("Linear", "RNNBase", "MultiheadAttention")
MIN_CALIBRATION_SAMPLES, DEFAULT_CALIBRATION_SAMPLES = 16, 512
MIN_BOUNDED = 128  # samples from which a bound of 5 percent shows, also where two are far off
MANY_NUMBERS = 64  # of a sample, from which outputs are compared by their cosine
USUAL_BATCH: int = Training.model_fields["batch_size"].default
MAX_TARGETS_READ = 32  # most samples that the model answers to find out what it is for
SMALL_WEIGHT_BYTES = 2**18
"""Below this, the graph description dominates a file's size, so that a size gate makes no sense."""


@dataclass(frozen=True)
class ModelTraits:
    """Properties of a model and its data that decide which stages and gates are proposed."""

    family: Family
    weight_bytes: int
    trained: bool
    """Whether there is a checkpoint."""
    samples: dict[str, int]
    """Number of samples by split; empty without data."""
    task: TaskName | None
    """What the model is for; None where neither the model nor the targets show it."""
    labelled: bool = False
    """Whether the samples have targets."""
    kind: str = "eager"
    """Kind of artifact that the model is imported as."""
    scale: float = 1.0
    """Largest absolute output on example inputs."""
    answers_rows: bool = False
    """Whether each output has a row for each sample."""
    answers_maps: bool = False
    """Whether an output has so many numbers for a sample that single ones say little."""
    only_batch: int | None = None
    """The declared batch size, where the model does not take the usual one of a training."""
    int8_share: float = 1.0
    """Share of the weights that lie in layers of 8-bit kernels."""
    linear_share: float = 1.0
    """Share of the weights that lie in linear layers: `quantize_weights` rounds no others."""

    @property
    def small(self) -> bool:
        """Whether the file's size says little about the weights."""
        return self.weight_bytes < SMALL_WEIGHT_BYTES

    @property
    def trainable(self) -> bool:
        """Whether there is training data with targets that a built-in loss takes."""
        known = self.task is not None and bool(TASKS[self.task].losses)
        return "train" in self.samples and self.labelled and known

    @property
    def calibrated(self) -> int:
        """Number of calibration samples; 0 where there are too few."""
        available = self.samples.get("calibration", self.samples.get("train", 0))
        enough = available >= MIN_CALIBRATION_SAMPLES
        return min(available, DEFAULT_CALIBRATION_SAMPLES) if enough else 0

    @property
    def has_labels(self) -> bool:
        """Whether the outputs are scores of classes or labels."""
        return self.task is not None and TASKS[self.task].has_labels

    @property
    def metric(self) -> str | None:
        """The metric to write; None where that of the task is meant, or there is no `val`."""
        if "val" not in self.samples:
            return None
        if not self.labelled and self.task != "embedding":
            return "fidelity" if self.has_labels else NO_METRIC
        if self.task == "regression":
            return "r2"  # has points, of which a hundred are all that can be predicted
        if self.task is None or not metric_class(TASKS[self.task].metric).needs_output_names:
            return None
        if not self.has_labels:
            return NO_METRIC
        return "accuracy" if TASKS[self.task].gates[0]["gate"] == "max_drop" else "loss"

    @property
    def quality_gates(self) -> tuple[dict[str, Any], ...]:
        """Gates on what compression costs, of which the first is enough after each stage."""
        if self.task == "embedding":
            return TASKS[self.task].gates
        if "val" in self.samples and self.task is not None and self.metric != NO_METRIC:
            one_point = ({"gate": "max_drop", "points": 1.0},)
            return one_point if self.task == "regression" else TASKS[self.task].gates
        if self.has_labels:
            return ({"gate": "label_agreement", "minimum": 0.9},)
        if self.answers_maps:
            # The largest difference would be that of the one number that counts least, as of a box
            # that no threshold of scores lets through.
            return TASKS["embedding"].gates
        if self.task is None and self.answers_rows and self.samples.get("val", 0) >= MIN_BOUNDED:
            return ({"gate": "max_disagreement", "percent": 5.0, "error": self.tolerance(0.1)},)
        return ({"gate": "parity", "atol": self.tolerance(0.1)},)

    def size_ratio(self, *, weights_alone: bool) -> float:
        """Return a limit on the share of the bytes that 8 bits leave, with a tenth of slack."""
        share = self.linear_share if weights_alone else self.int8_share
        # Weights in 8 bits take a quarter of those in float32, which saves three quarters.
        return max(0.5, round(1.1 - 0.75 * share, 2))

    def tolerance(self, fraction: float) -> float:
        """Return a fraction of the largest output, to one digit."""
        return float(f"{fraction * self.scale:.0e}")


def inspect_model(
    module: nn.Module,
    data: Splits | None,
    trained: bool,
    signature: Signature | None = None,
    task: TaskName | None = None,
) -> ModelTraits:
    """Inspect the layers, weights, outputs and data; inputs are examples without data."""
    from torch import nn

    family = family_of(module)
    layers = {"convolutional": CONVOLUTION_LAYERS, "linear": PRODUCT_LAYERS}.get(family, ())
    kinds = tuple(getattr(nn, name) for name in layers)
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    parents = {name: layer for name, layer in module.named_modules() if isinstance(layer, kinds)}
    fast = {name: n for name, n in sizes.items() if name.rpartition(".")[0] in parents}
    linear = [n for k, n in fast.items() if isinstance(parents[k.rpartition(".")[0]], nn.Linear)]
    weight_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    int8, total = sum(fast.values()), max(1, sum(sizes.values()))
    traits = ModelTraits(family, weight_bytes, trained, {}, task)
    traits = replace(traits, int8_share=int8 / total, linear_share=sum(linear) / total)
    return with_data(traits, lambda *inputs: run_in_eval(module, inputs), data, signature)


def with_data(
    traits: ModelTraits, predict: Any, data: Splits | None, signature: Signature | None
) -> ModelTraits:
    """Add what samples and outputs show: the task, and how large outputs are."""
    import torch

    samples: dict[str, Any] = dict(data.datasets) if data else {}
    targets, only_batch = None, None
    if data is not None:
        name = next((n for n in ("train", "val") if n in samples), next(iter(samples)))
        is_fixed = signature is not None and not signature.batch_axis
        rows = signature.smallest_batch if signature and is_fixed else MAX_TARGETS_READ
        batch = next(data.batches(name, rows, max(rows, MAX_TARGETS_READ)))
        inputs, targets = batch.inputs, batch.target
        only_batch = rows if is_fixed and not takes_rows(predict, inputs, USUAL_BATCH) else None
    elif signature is not None:
        inputs = signature.example()
    else:
        return traits
    answers = predict(*inputs)
    if isinstance(targets, torch.Tensor) and len(targets) == len(inputs[0]) > 1 and not is_fixed:
        refuse_one_answer(predict, inputs, answers)
    outputs = [x for x in answers if x.is_floating_point()]
    # Untrained models may answer NaN and infinity, which say nothing about the scale.
    largest = max((float(x.abs().nan_to_num(0, 0, 0).max()) for x in outputs), default=1.0)
    task = traits.task
    if task is None and isinstance(targets, torch.Tensor) and outputs:
        inferred = infer_task(targets, outputs[0])
        task = inferred.name if inferred else None
    return replace(
        traits,
        samples={name: len(split) for name, split in samples.items()},
        task=task,
        labelled=targets is not None,
        scale=largest or 1.0,
        answers_rows=all(x.shape[:1] == inputs[0].shape[:1] for x in outputs),
        answers_maps=any(x.numel() >= MANY_NUMBERS * len(inputs[0]) for x in outputs),
        only_batch=only_batch,
    )


def task_of_library(module: nn.Module, pipeline: PipelineConfig) -> TaskName | None:
    """Return the task of a model of transformers or timm, by its class and configuration."""
    if isinstance(pipeline.model, model_spec.TimmModel):
        return "classification" if getattr(module, "num_classes", 0) else "embedding"
    task, _ = task_of(pipeline)
    if not isinstance(pipeline.model, model_spec.HuggingFaceModel):
        return None
    if task is None:
        return "embedding" if type(module).__name__.endswith(("Model", "Encoder")) else None
    config: Any = module.config
    one_number = type(module).__name__.endswith("SequenceClassification") and config.num_labels == 1
    return "regression" if one_number and not config.problem_type else task.name


def family_of(module: nn.Module) -> Family:
    """Classify a model by its most frequent kind of layer; those that share a weight count once."""
    from torch import nn

    def count(names: Sequence[str]) -> int:
        kinds = tuple(getattr(nn, name) for name in names)
        layers = (layer for layer in module.modules() if isinstance(layer, kinds))
        # An ONNX file may have a layer for each step of a recurrent one that was unrolled.
        return len({id(next(layer.parameters(), layer)) for layer in layers})

    convolutions, products = count(CONVOLUTION_LAYERS), count(PRODUCT_LAYERS)
    if convolutions and convolutions >= products:
        return "convolutional"
    return "linear" if products else "other"
