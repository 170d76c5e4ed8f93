"""The functions of the stages that export: `compress.export_onnx` and its like."""

from compress.export.aotinductor.stage import ExportAot
from compress.export.compressed_tensors.stage import ExportCompressedTensors
from compress.export.executorch.stage import ExportExecuTorch
from compress.export.exported_program import ExportProgram
from compress.export.fastest.stage import ExportFastest
from compress.export.genai.stage import ExportGenai
from compress.export.gguf.stage import ExportGguf
from compress.export.onnx.cascade import Cascade
from compress.export.onnx.stage import ExportOnnx
from compress.export.openvino.stage import ExportOpenVINO
from compress.export.tensorrt.stage import ExportTensorRT
from compress.export.torchscript.stage import ExportTorchScript
from compress.functional.stage_function import stage_function

export_fastest = stage_function(ExportFastest)
export_onnx = stage_function(ExportOnnx, takes_file=True)
cascade = stage_function(Cascade, takes_file=True)
export_program = stage_function(ExportProgram, takes_file=True)
export_torchscript = stage_function(ExportTorchScript, takes_file=True)
export_aot = stage_function(ExportAot, takes_file=True)
export_openvino = stage_function(ExportOpenVINO, takes_file=True)
export_executorch = stage_function(ExportExecuTorch, takes_file=True)
export_genai = stage_function(ExportGenai)
export_gguf = stage_function(ExportGguf)
export_compressed_tensors = stage_function(ExportCompressedTensors)
export_tensorrt = stage_function(ExportTensorRT, takes_file=True)
