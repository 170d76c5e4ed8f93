"""ONNX Runtime's own quantization tools, as its documentation recommends them."""

from job import Job, run
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.quantization.shape_inference import quant_pre_process


class Reader(CalibrationDataReader):
    """Feeds batches of samples to the calibration."""

    def __init__(self, batches) -> None:
        self.batches = iter(batches)

    def get_next(self):
        return next(self.batches, None)


def _prepared(job: Job):
    prepared = job.output.with_suffix(".prepared.onnx")
    quant_pre_process(job.model, prepared, skip_symbolic_shape=True)
    return prepared


def static(job: Job) -> None:
    """QDQ, weights by channel, unsigned activations."""
    quantize_static(
        _prepared(job),
        job.output,
        Reader(job.batches()),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )


def dynamic(job: Job) -> None:
    quantize_dynamic(_prepared(job), job.output, per_channel=True, weight_type=QuantType.QInt8)


def weights(job: Job) -> None:
    """4 bits in groups of 32 by round-to-nearest, embedding tables too, int8 products."""
    import onnx

    quantizer = MatMulNBitsQuantizer(
        onnx.load(job.model),
        bits=4,
        block_size=32,
        is_symmetric=True,
        accuracy_level=4,
        op_types_to_quantize=("MatMul", "Gather"),
        quant_axes=(("MatMul", 0), ("Gather", 1)),
    )
    quantizer.process()
    quantizer.model.save_model_to_file(str(job.output))


if __name__ == "__main__":
    run({"static": static, "dynamic": dynamic, "weights": weights})
