"""Make a trained PyTorch model small and fast, and prove what was kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.core.lazy import imported_on_use

if TYPE_CHECKING:
    from compress.core.artifact import Artifact, Predictor
    from compress.core.checkpoint import consolidate
    from compress.core.data import Splits
    from compress.core.eager import EagerModel
    from compress.core.errors import (
        ArtifactInvalid,
        CompressError,
        GateRefused,
        PipelineInvalid,
        StageFailed,
        Unavailable,
    )
    from compress.core.gate import Verdict
    from compress.core.gates import (
        LabelAgreement,
        MaxDrop,
        MaxLatency,
        MaxMemory,
        MaxParameters,
        MaxSize,
        MinMetric,
        MinSpeedup,
        Parity,
    )
    from compress.core.graph import GraphModel
    from compress.core.loss import Loss
    from compress.core.metrics import Metric
    from compress.core.signature import Signature, TensorSpec
    from compress.core.stage import Context, Stage
    from compress.distillation.stage import Distill
    from compress.pruning.finetuning import Finetune
    from compress.pruning.layers_stage import PruneLayers
    from compress.pruning.stage import PruneChannels
    from compress.pruning.targets import Target
    from compress.pruning.weights_stage import PruneWeights
    from compress.quantization.dynamic_stage import QuantizeDynamic
    from compress.quantization.mixed_stage import QuantizeMixed
    from compress.quantization.precision_stage import ConvertPrecision
    from compress.quantization.qat_stage import QuantizeAwareTraining
    from compress.quantization.static_stage import QuantizeStatic
    from compress.quantization.weights_stage import QuantizeWeights
    from compress.training.parallel import Parallel
    from compress.training.settings import Training
    from compress.training.stage import Train

__version__ = "0.1.0.dev0"

__all__ = [
    "Artifact",
    "ArtifactInvalid",
    "CompressError",
    "Context",
    "ConvertPrecision",
    "Distill",
    "EagerModel",
    "Finetune",
    "GateRefused",
    "GraphModel",
    "LabelAgreement",
    "Loss",
    "MaxDrop",
    "MaxLatency",
    "MaxMemory",
    "MaxParameters",
    "MaxSize",
    "Metric",
    "MinMetric",
    "MinSpeedup",
    "Parallel",
    "Parity",
    "PipelineInvalid",
    "Predictor",
    "PruneChannels",
    "PruneLayers",
    "PruneWeights",
    "QuantizeAwareTraining",
    "QuantizeDynamic",
    "QuantizeMixed",
    "QuantizeStatic",
    "QuantizeWeights",
    "Signature",
    "Splits",
    "Stage",
    "StageFailed",
    "Target",
    "TensorSpec",
    "Train",
    "Training",
    "Unavailable",
    "Verdict",
    "consolidate",
]

_HOMES = {
    "compress.core.artifact": ("Artifact", "Predictor"),
    "compress.core.checkpoint": ("consolidate",),
    "compress.core.data": ("Splits",),
    "compress.core.eager": ("EagerModel",),
    "compress.core.errors": (
        "ArtifactInvalid",
        "CompressError",
        "GateRefused",
        "PipelineInvalid",
        "StageFailed",
        "Unavailable",
    ),
    "compress.core.gate": ("Verdict",),
    "compress.core.gates": (
        "LabelAgreement",
        "MaxDrop",
        "MaxLatency",
        "MaxMemory",
        "MaxParameters",
        "MaxSize",
        "MinMetric",
        "MinSpeedup",
        "Parity",
    ),
    "compress.core.graph": ("GraphModel",),
    "compress.core.loss": ("Loss",),
    "compress.core.metrics": ("Metric",),
    "compress.core.signature": ("Signature", "TensorSpec"),
    "compress.core.stage": ("Context", "Stage"),
    "compress.distillation.stage": ("Distill",),
    "compress.pruning.finetuning": ("Finetune",),
    "compress.pruning.layers_stage": ("PruneLayers",),
    "compress.pruning.stage": ("PruneChannels",),
    "compress.pruning.targets": ("Target",),
    "compress.pruning.weights_stage": ("PruneWeights",),
    "compress.quantization.dynamic_stage": ("QuantizeDynamic",),
    "compress.quantization.qat_stage": ("QuantizeAwareTraining",),
    "compress.quantization.mixed_stage": ("QuantizeMixed",),
    "compress.quantization.precision_stage": ("ConvertPrecision",),
    "compress.quantization.static_stage": ("QuantizeStatic",),
    "compress.quantization.weights_stage": ("QuantizeWeights",),
    "compress.training.parallel": ("Parallel",),
    "compress.training.settings": ("Training",),
    "compress.training.stage": ("Train",),
}

__getattr__ = imported_on_use(__name__, _HOMES)
