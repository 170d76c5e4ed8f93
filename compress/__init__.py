"""Make a trained PyTorch model small and fast, and prove what was kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.core.lazy import imported_on_use

if TYPE_CHECKING:
    from compress.core.artifact import Artifact, Predictor
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
    from compress.core.gates import (
        LabelAgreement,
        MaxDrop,
        MaxLatency,
        MaxParameters,
        MaxSize,
        MinMetric,
        MinSpeedup,
        Parity,
        Verdict,
    )
    from compress.core.graph import GraphModel
    from compress.core.metrics import Metric
    from compress.core.signature import Signature, TensorSpec
    from compress.core.stage import Context, Stage
    from compress.distillation.stage import Distill
    from compress.pruning.stage import PruneChannels
    from compress.quantization.stage import QuantizeStatic
    from compress.training.settings import Parallel, Training
    from compress.training.stage import Train

__version__ = "0.1.0.dev0"

__all__ = [
    "Artifact",
    "ArtifactInvalid",
    "CompressError",
    "Context",
    "Distill",
    "EagerModel",
    "GateRefused",
    "GraphModel",
    "LabelAgreement",
    "MaxDrop",
    "MaxLatency",
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
    "QuantizeStatic",
    "Signature",
    "Splits",
    "Stage",
    "StageFailed",
    "TensorSpec",
    "Train",
    "Training",
    "Unavailable",
    "Verdict",
]

_HOMES = {
    "compress.core.artifact": ("Artifact", "Predictor"),
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
    "compress.core.gates": (
        "LabelAgreement",
        "MaxDrop",
        "MaxLatency",
        "MaxParameters",
        "MaxSize",
        "MinMetric",
        "MinSpeedup",
        "Parity",
        "Verdict",
    ),
    "compress.core.graph": ("GraphModel",),
    "compress.core.metrics": ("Metric",),
    "compress.core.signature": ("Signature", "TensorSpec"),
    "compress.core.stage": ("Context", "Stage"),
    "compress.distillation.stage": ("Distill",),
    "compress.pruning.stage": ("PruneChannels",),
    "compress.quantization.stage": ("QuantizeStatic",),
    "compress.training.settings": ("Parallel", "Training"),
    "compress.training.stage": ("Train",),
}

__getattr__ = imported_on_use(__name__, _HOMES)
