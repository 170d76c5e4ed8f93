"""The functions of this package's stages."""

from compress.distillation.stage import Distill
from compress.functional.stage_function import stage_function
from compress.pruning.prune_channels import PruneChannels
from compress.pruning.prune_layers import PruneLayers
from compress.pruning.prune_weights import PruneWeights
from compress.quantization.stages.dynamic import QuantizeDynamic
from compress.quantization.stages.half_precision import ConvertPrecision
from compress.quantization.stages.mixed_precision import QuantizeMixed
from compress.quantization.stages.qat import QuantizeAwareTraining
from compress.quantization.stages.rotation import RotateWeights
from compress.quantization.stages.static import QuantizeStatic
from compress.quantization.stages.weight_only import QuantizeWeights
from compress.training.stage import Train

train = stage_function(Train)
distill = stage_function(Distill)
prune_channels = stage_function(PruneChannels)
prune_layers = stage_function(PruneLayers)
prune_weights = stage_function(PruneWeights)
rotate_weights = stage_function(RotateWeights)
quantize_static = stage_function(QuantizeStatic)
quantize_dynamic = stage_function(QuantizeDynamic)
quantize_weights = stage_function(QuantizeWeights)
quantize_mixed = stage_function(QuantizeMixed)
quantize_aware_training = stage_function(QuantizeAwareTraining)
convert_precision = stage_function(ConvertPrecision)
