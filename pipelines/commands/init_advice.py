"""Choose the stages and gates that `compress init` proposes, from the model, data and goal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from compress.core.task_targets import TargetKind
    from compress.data.splits import Splits

Target = Literal["onnx", "torchscript", "aot"]
Goal = Literal["smaller", "faster", "both"]
Family = Literal["convolutional", "linear", "other"]

MIN_CALIBRATION_SAMPLES, DEFAULT_CALIBRATION_SAMPLES = 16, 512
MOST_TARGETS_READ = 64
"""Most samples whose targets are read to find out whether they are labels or numbers."""
SMALL_BYTES = 2**18
"""Below this, the graph description dominates a file's size, so that a size gate makes no sense."""
EXPORTS: dict[Target, str] = {
    "onnx": "export_onnx",
    "torchscript": "export_torchscript",
    "aot": "export_aot",
}
INTEGERS: dict[Target, dict[str, str]] = {"aot": {"target": "inductor-cpu"}}
"""Quantization settings for export targets that do not use the default integer kernels."""


@dataclass(frozen=True)
class ModelTraits:
    """Properties of a model and its data that decide which stages are proposed."""

    family: Family
    weight_bytes: int
    trained: bool
    """Whether there is a checkpoint."""
    samples: dict[str, int]
    """Number of samples by split; empty without data."""
    targets: TargetKind | None
    """Kind of targets; None where samples have none, or several labels each."""

    @property
    def trainable(self) -> bool:
        """Whether there is training data with usable targets."""
        return "train" in self.samples and self.targets is not None

    @property
    def calibrated(self) -> int:
        """Number of calibration samples; 0 where there are too few."""
        available = self.samples.get("calibration", self.samples.get("train", 0))
        return (
            min(available, DEFAULT_CALIBRATION_SAMPLES)
            if available >= MIN_CALIBRATION_SAMPLES
            else 0
        )


@dataclass(frozen=True)
class ProposedStage:
    """Settings of a stage, and a comment for the file on why it is proposed."""

    why: str
    settings: dict[str, Any]


def inspect_model(module: nn.Module, data: Splits | None, trained: bool) -> ModelTraits:
    """Inspect the layers, weights and data."""
    samples: dict[str, Any] = dict(data.datasets) if data else {}
    return ModelTraits(
        family=family_of(module),
        weight_bytes=sum(p.numel() * p.element_size() for p in module.parameters()),
        trained=trained,
        samples={name: len(split) for name, split in samples.items()},
        targets=_targets(samples.get("train", next(iter(samples.values())))) if samples else None,
    )


def family_of(module: nn.Module) -> Family:
    """Classify a model by its most frequent kind of layer."""
    from torch import nn

    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    products = (nn.Linear, nn.RNNBase, nn.MultiheadAttention)
    convolution_count = sum(isinstance(layer, convolutions) for layer in module.modules())
    linear_count = sum(isinstance(layer, products) for layer in module.modules())
    if convolution_count and convolution_count >= linear_count:
        return "convolutional"
    return "linear" if linear_count else "other"


def _targets(split: Any) -> TargetKind | None:
    import torch

    from compress.core.task_targets import target_kind
    from compress.data.batch import adapt

    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(0))
    found = [adapt(split[i])[1] for i in order[:MOST_TARGETS_READ].tolist()]
    known = [target for target in found if target is not None]
    if not known or any(target.shape != known[0].shape for target in known):
        return None
    kind = target_kind(torch.stack(known))
    return None if kind == "labels" and known[0].dim() else kind


def propose_stages(found: ModelTraits, target: Target, goal: Goal) -> list[ProposedStage]:
    """Propose stages with reasons, and gates that check the goal."""
    stages = [
        *_training_stage(found),
        *_pruning_stage(found, goal),
        *_quantization_stage(found, target, goal),
    ]
    base = "train" if stages and stages[0].settings["stage"] == "train" else "source"
    for stage in stages:
        if "val" in found.samples and stage.settings["stage"] != "train":
            drop = {"gate": "max_drop", "points": 1.0, "against": base}
            stage.settings["gates"] = [drop]
    quantized = bool(stages) and stages[-1].settings["stage"].startswith("quantize")
    gates = [_output_gate(found, quantized, base), *_goal_gates(found, goal, base)]
    export: dict[str, Any] = {"stage": EXPORTS[target], "gates": gates}
    return [
        *stages,
        ProposedStage("The file to deploy, compared with the model it was made from.", export),
    ]


def _training_stage(found: ModelTraits) -> Iterator[ProposedStage]:
    if not found.trained and found.trainable:
        why = "No checkpoint was given; leave this out where the factory gives trained weights."
        yield ProposedStage(why, {"stage": "train", "epochs": 10})


def _pruning_stage(found: ModelTraits, goal: Goal) -> Iterator[ProposedStage]:
    if found.family == "convolutional" and goal != "smaller" and found.trainable:
        finetune = {"epochs": 5}
        why = "Whole channels go, and training makes up for them; a lower ratio loses less."
        yield ProposedStage(why, {"stage": "prune_channels", "ratio": 0.3, "finetune": finetune})


def _quantization_stage(found: ModelTraits, target: Target, goal: Goal) -> Iterator[ProposedStage]:
    integers = INTEGERS.get(target, {})
    if found.family == "convolutional" and found.calibrated:
        settings = {"stage": "quantize_static", "calibration_samples": found.calibrated}
        yield ProposedStage(
            "Convolutions in 8-bit integers, calibrated on the data.", settings | integers
        )
    elif found.family == "linear" and goal == "smaller" and target == "onnx":
        why = "Weights in 8 bits (bits: 4 halves them again); what is computed stays float."
        yield ProposedStage(why, {"stage": "quantize_weights", "bits": 8})
    elif found.family == "linear":
        why = "Linear and recurrent layers in 8-bit integers; ranges are taken in each call."
        yield ProposedStage(why, {"stage": "quantize_dynamic", **integers})


def _output_gate(found: ModelTraits, quantized: bool, base: str) -> dict[str, Any]:
    """Return the gate that compares an export's outputs; int8 rounding may flip near-ties."""
    if not quantized:
        return {"gate": "parity", "atol": 0.001}
    if found.targets == "numbers" and "val" in found.samples:
        return {"gate": "max_drop", "points": 1.0, "against": base}
    return {"gate": "label_agreement", "minimum": 0.99 if "val" in found.samples else 0.9}


def _goal_gates(found: ModelTraits, goal: Goal, base: str) -> Iterator[dict[str, Any]]:
    if goal != "faster" and found.weight_bytes >= SMALL_BYTES:
        yield {"gate": "max_size", "ratio": 0.5, "against": base}
    if goal != "smaller":
        yield {"gate": "min_speedup", "ratio": 1.0, "against": base}
