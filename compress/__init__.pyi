from .artifacts.artifact import Artifact as Artifact
from .artifacts.eager_model import EagerModel as EagerModel
from .artifacts.graph_model import GraphModel as GraphModel
from .checkpoint.loading import consolidate as consolidate
from .common.errors import ArtifactInvalid as ArtifactInvalid
from .common.errors import CompressError as CompressError
from .common.errors import GateRefused as GateRefused
from .common.errors import PipelineInvalid as PipelineInvalid
from .common.errors import StageFailed as StageFailed
from .common.errors import Unavailable as Unavailable
from .common.forward import Predictor as Predictor
from .common.signature import Signature as Signature
from .common.signature import TensorSpec as TensorSpec
from .core.context import Context as Context
from .core.gate_kinds.call_cost import MaxLatency as MaxLatency
from .core.gate_kinds.call_cost import MaxMemory as MaxMemory
from .core.gate_kinds.call_cost import MinSpeedup as MinSpeedup
from .core.gate_kinds.generation_speed import MaxFirstToken as MaxFirstToken
from .core.gate_kinds.generation_speed import MinTokensPerSecond as MinTokensPerSecond
from .core.gate_kinds.kernel_shares import MinDelegated as MinDelegated
from .core.gate_kinds.kernel_shares import MinIntegerMacs as MinIntegerMacs
from .core.gate_kinds.next_tokens import MaxDivergence as MaxDivergence
from .core.gate_kinds.next_tokens import MinEqualTokens as MinEqualTokens
from .core.gate_kinds.other_runtime import RunsIn as RunsIn
from .core.gates import LabelAgreement as LabelAgreement
from .core.gates import MaxDrop as MaxDrop
from .core.gates import MaxFileSize as MaxFileSize
from .core.gates import MaxParameters as MaxParameters
from .core.gates import MaxRelativeDrop as MaxRelativeDrop
from .core.gates import MaxSize as MaxSize
from .core.gates import MinCosine as MinCosine
from .core.gates import MinMetric as MinMetric
from .core.gates import Parity as Parity
from .core.loss import Loss as Loss
from .core.metrics import Metric as Metric
from .core.stage import Stage as Stage
from .core.verdict import Verdict as Verdict
from .data.splits import Splits as Splits
from .distillation.stage import Distill as Distill
from .functional.stages import convert_precision as convert_precision
from .functional.stages import distill as distill
from .functional.stages import prune_channels as prune_channels
from .functional.stages import prune_layers as prune_layers
from .functional.stages import prune_weights as prune_weights
from .functional.stages import quantize_aware_training as quantize_aware_training
from .functional.stages import quantize_dynamic as quantize_dynamic
from .functional.stages import quantize_mixed as quantize_mixed
from .functional.stages import quantize_static as quantize_static
from .functional.stages import quantize_weights as quantize_weights
from .functional.stages import rotate_weights as rotate_weights
from .functional.stages import train as train
from .pruning.channel_settings import Target as Target
from .pruning.prune_channels import PruneChannels as PruneChannels
from .pruning.prune_layers import PruneLayers as PruneLayers
from .pruning.prune_weights import PruneWeights as PruneWeights
from .pruning.pruning_stage import Finetune as Finetune
from .quantization.stages.dynamic import QuantizeDynamic as QuantizeDynamic
from .quantization.stages.half_precision import ConvertPrecision as ConvertPrecision
from .quantization.stages.mixed_precision import QuantizeMixed as QuantizeMixed
from .quantization.stages.qat import QuantizeAwareTraining as QuantizeAwareTraining
from .quantization.stages.rotation import RotateWeights as RotateWeights
from .quantization.stages.static import QuantizeStatic as QuantizeStatic
from .quantization.stages.weight_only import QuantizeWeights as QuantizeWeights
from .training.config.parallel import Parallel as Parallel
from .training.config.training import Training as Training
from .training.stage import Train as Train

__version__: str

# Of packages above this one, see __init__.py.
def export_aot(model: object, *args: object, **settings: object) -> Artifact: ...
def export_compressed_tensors(model: object, *args: object, **settings: object) -> Artifact: ...
def export_executorch(model: object, *args: object, **settings: object) -> Artifact: ...
def export_fastest(model: object, **settings: object) -> Artifact: ...
def export_genai(model: object, *args: object, **settings: object) -> Artifact: ...
def export_gguf(model: object, *args: object, **settings: object) -> Artifact: ...
def export_onnx(model: object, *args: object, **settings: object) -> Artifact: ...
def export_openvino(model: object, *args: object, **settings: object) -> Artifact: ...
def export_program(model: object, *args: object, **settings: object) -> Artifact: ...
def export_tensorrt(model: object, *args: object, **settings: object) -> Artifact: ...
def export_torchscript(model: object, *args: object, **settings: object) -> Artifact: ...
def package_kserve(model: object, **settings: object) -> Artifact: ...
def package_torchserve(model: object, **settings: object) -> Artifact: ...
def package_triton(model: object, **settings: object) -> Artifact: ...
def auto(model: object, **settings: object) -> object: ...
def optimize(model: object, **settings: object) -> object: ...
def bench(*models: object, **settings: object) -> object: ...
