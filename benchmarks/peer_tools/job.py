"""What one tool is to do, read from a JSON file; run in the tool's own environment."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Job:
    """One model to quantize, as each tool's script gets it."""

    model: Path
    """The float ONNX file."""
    samples: Path
    """Archive of the calibration samples: an array [samples, …] for each input."""
    output: Path
    """The ONNX file to write."""
    transformer: bool

    def batches(self, size: int = 32) -> list[dict[str, np.ndarray]]:
        """Return the calibration samples in batches."""
        with np.load(self.samples) as arrays:
            inputs = {name: arrays[name] for name in arrays.files}
        count = len(next(iter(inputs.values())))
        return [
            {name: array[start : start + size] for name, array in inputs.items()}
            for start in range(0, count, size)
        ]


def run(recipes: dict) -> None:
    """Run the recipe that the job file named on the command line asks for."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    paths = {name: Path(settings[name]) for name in ("model", "samples", "output")}
    recipes[settings["recipe"]](Job(transformer=settings["transformer"], **paths))
