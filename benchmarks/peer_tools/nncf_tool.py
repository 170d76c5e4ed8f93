"""NNCF on ONNX files, as its documentation recommends."""

import nncf
import onnx
from job import Job, run


def static(job: Job) -> None:
    """Post-training quantization with fast bias correction; smoothing for transformers."""
    batches = job.batches()
    model_type = nncf.ModelType.TRANSFORMER if job.transformer else None
    quantized = nncf.quantize(
        onnx.load(job.model), nncf.Dataset(batches), subset_size=len(batches), model_type=model_type
    )
    onnx.save(quantized, job.output)


def weights(job: Job) -> None:
    """4 bits in groups of 32, scales estimated on the samples; embedding tables in 8 bits.

    With `all_layers` NNCF 3.4 writes a table's look-up as a product, which no runtime loads.
    """
    batches = job.batches(1)[:128]
    compressed = nncf.compress_weights(
        onnx.load(job.model),
        mode=nncf.CompressWeightsMode.INT4_SYM,
        group_size=32,
        dataset=nncf.Dataset(batches),
        scale_estimation=True,
    )
    onnx.save(compressed, job.output)


if __name__ == "__main__":
    run({"static": static, "weights": weights})
