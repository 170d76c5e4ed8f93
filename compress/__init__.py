"""Make a trained PyTorch model small and fast, and prove what was kept."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.checkpoint.loading import consolidate
    from compress.common.errors import (
        ArtifactInvalid,
        CompressError,
        GateRefused,
        PipelineInvalid,
        StageFailed,
        Unavailable,
    )
    from compress.common.forward import Predictor
    from compress.common.signature import Signature, TensorSpec
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
    from compress.core.loss import Loss
    from compress.core.metrics import Metric
    from compress.core.stage import Context, Stage
    from compress.data.splits import Splits
    from compress.distillation.stage import Distill
    from compress.pruning.allocation.targets import Target
    from compress.pruning.blocks_stage import PruneLayers
    from compress.pruning.channels_stage import PruneChannels
    from compress.pruning.finetune import Finetune
    from compress.pruning.unstructured_stage import PruneWeights
    from compress.quantization.stages.dynamic import QuantizeDynamic
    from compress.quantization.stages.half_precision import ConvertPrecision
    from compress.quantization.stages.mixed_precision import QuantizeMixed
    from compress.quantization.stages.qat import QuantizeAwareTraining
    from compress.quantization.stages.static import QuantizeStatic
    from compress.quantization.stages.weight_only import QuantizeWeights
    from compress.training.config.parallel import Parallel
    from compress.training.config.training import Training
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

_NAMES_BY_MODULE = {
    "compress.artifacts.artifact": ("Artifact",),
    "compress.checkpoint.loading": ("consolidate",),
    "compress.data.splits": ("Splits",),
    "compress.artifacts.eager_model": ("EagerModel",),
    "compress.common.errors": (
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
    "compress.artifacts.graph_model": ("GraphModel",),
    "compress.core.loss": ("Loss",),
    "compress.core.metrics": ("Metric",),
    "compress.common.forward": ("Predictor",),
    "compress.common.signature": ("Signature", "TensorSpec"),
    "compress.core.stage": ("Context", "Stage"),
    "compress.distillation.stage": ("Distill",),
    "compress.pruning.finetune": ("Finetune",),
    "compress.pruning.blocks_stage": ("PruneLayers",),
    "compress.pruning.channels_stage": ("PruneChannels",),
    "compress.pruning.allocation.targets": ("Target",),
    "compress.pruning.unstructured_stage": ("PruneWeights",),
    "compress.quantization.stages.dynamic": ("QuantizeDynamic",),
    "compress.quantization.stages.qat": ("QuantizeAwareTraining",),
    "compress.quantization.stages.mixed_precision": ("QuantizeMixed",),
    "compress.quantization.stages.half_precision": ("ConvertPrecision",),
    "compress.quantization.stages.static": ("QuantizeStatic",),
    "compress.quantization.stages.weight_only": ("QuantizeWeights",),
    "compress.training.config.parallel": ("Parallel",),
    "compress.training.config.training": ("Training",),
    "compress.training.stage": ("Train",),
}

_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562): `compress --help` must not load every stage."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
