"""Intel's Neural Compressor for ONNX files, as its documentation recommends."""

import onnx
from job import Job, run
from onnx_neural_compressor import data_reader
from onnx_neural_compressor.quantization import (
    QuantFormat,
    config,
    matmul_nbits_quantizer,
    quantize,
)


class Reader(data_reader.CalibrationDataReader):
    """Feeds batches of samples to the calibration."""

    def __init__(self, batches) -> None:
        self.all = batches
        self.rewind()

    def get_next(self):
        return next(self.batches, None)

    def rewind(self) -> None:
        self.batches = iter(self.all)


def _named(job: Job):
    """Return a copy of the file whose nodes have names, by which the tool knows them."""
    model = onnx.load(job.model)
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    named = job.output.with_suffix(".named.onnx")
    onnx.save(model, named)
    return named


def static(job: Job) -> None:
    batches = job.batches()
    settings = config.StaticQuantConfig(
        Reader(batches),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        calibration_sampling_size=len(batches),
        extra_options={"SmoothQuant": True} if job.transformer else None,
    )
    quantize(_named(job), job.output, settings)


def dynamic(job: Job) -> None:
    quantize(_named(job), job.output, config.DynamicQuantConfig(per_channel=True))


def weights(job: Job) -> None:
    """4 bits in groups of 32 by GPTQ."""
    settings = matmul_nbits_quantizer.GPTQWeightOnlyQuantConfig(
        calibration_data_reader=Reader(job.batches()), block_size=32
    )
    quantizer = matmul_nbits_quantizer.MatMulNBitsQuantizer(
        onnx.load(_named(job)),
        n_bits=4,
        block_size=32,
        is_symmetric=True,
        accuracy_level=4,
        algo_config=settings,
    )
    quantizer.process()
    onnx.save(quantizer.model, job.output)


if __name__ == "__main__":
    run({"static": static, "dynamic": dynamic, "weights": weights})
