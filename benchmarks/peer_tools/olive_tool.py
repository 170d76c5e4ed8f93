"""Olive's passes on ONNX files, by one workflow each."""

import shutil
from pathlib import Path

import numpy as np
from job import Job, run
from olive import run as run_workflow
from olive.data.registry import Registry


class Samples:
    """Calibration samples and no labels, as Olive's loader wants them."""

    def __init__(self, file: str) -> None:
        with np.load(file) as arrays:
            self.inputs = {name: arrays[name] for name in arrays.files}

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def __getitem__(self, index: int):
        return {name: array[index] for name, array in self.inputs.items()}, 0


@Registry.register_dataset()
def calibration_samples(file: str, **_):
    return Samples(file)


def _run(job: Job, quantization: dict, *before: dict) -> None:
    folder = job.output.with_suffix(".olive")
    passes = {f"step{index}": settings for index, settings in enumerate((*before, quantization))}
    data = {
        "name": "calibration",
        "type": "DataContainer",
        "load_dataset_config": {
            "type": "calibration_samples",
            "params": {"file": str(job.samples)},
        },
        "dataloader_config": {"type": "default_dataloader", "params": {"batch_size": 32}},
    }
    run_workflow(
        {
            "input_model": {"type": "ONNXModel", "model_path": str(job.model)},
            "data_configs": [data],
            "passes": passes,
            "output_dir": str(folder),
            "cache_dir": str(folder.with_suffix(".cache")),
            "log_severity_level": 3,
        }
    )
    (written,) = Path(folder).rglob("*.onnx")
    shutil.copy(written, job.output)
    for data_file in written.parent.glob(f"{written.name}.data"):  # the name is in the file
        shutil.copy(data_file, job.output.parent / data_file.name)


def static(job: Job) -> None:
    settings = {"data_config": "calibration", "per_channel": True, "precision": "int8"}
    _run(job, {"type": "OnnxStaticQuantization", "activation_type": "uint8", **settings})


def dynamic(job: Job) -> None:
    _run(job, {"type": "OnnxDynamicQuantization", "per_channel": True, "precision": "int8"})


def weights(job: Job) -> None:
    """4 bits in groups of 32 by round-to-nearest, embedding tables too, int8 products."""
    settings = {"bits": 4, "block_size": 32, "accuracy_level": 4}
    _run(job, {"type": "OnnxBlockWiseRtnQuantization", **settings})


if __name__ == "__main__":
    run({"static": static, "dynamic": dynamic, "weights": weights})
