"""Peak memory and time of calibration against the number of samples, each in a fresh process.

The time is that of the whole stage; `ms more` is the time of each sample beyond the fewest.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from compress import Context, QuantizeStatic, Splits
from compress.quantization.config.dtype_scheme import BuiltInObserver
from quantizer.sources import HERE, at, image_model

COUNTS = (64, 512, 2048)
SIDE = 32
"""Pixels of an image's side."""


def main() -> None:
    parser = argparse.ArgumentParser("quantization.py memory", description=__doc__)
    parser.add_argument("--small", action="store_true", help="only the first observer")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_calibrate(options.one[0], int(options.one[1]))))
        return
    observers = BuiltInObserver.__args__[:1] if options.small else BuiltInObserver.__args__
    print(f"{'observer':18}{'samples':>8}{'peak MB':>9}{'ratio':>7}{'seconds':>9}{'ms more':>9}")
    for observer in observers:
        fewest: list[float] = []
        for count in COUNTS:
            command = [sys.executable, sys.argv[0], "memory", "--one", observer, str(count)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
            peak, seconds = json.loads(done.stdout.splitlines()[-1])
            fewest = fewest or [peak, seconds]
            more = 1e3 * (seconds - fewest[1]) / max(count - COUNTS[0], 1)
            print(
                f"{observer:18}{count:8}{peak:9.0f}{peak / fewest[0]:7.3f}"
                f"{seconds:9.1f}{more:9.2f}",
                flush=True,
            )


def _calibrate(observer: str, count: int) -> tuple[float, float]:
    """Return the peak resident memory in megabytes, and the CPU seconds that calibration took."""
    import resource

    torch.set_num_threads(1)
    sys.path.insert(0, str(HERE))
    with tempfile.TemporaryDirectory() as folder:
        model = image_model(Path(folder), "resnet18", (3, SIDE, SIDE))
        images = torch.randn(1, 3, SIDE, SIDE).expand(2048, -1, -1, -1)
        shifted = Shifted(images)
        data = Splits({"train": shifted, "val": shifted}, batch_size=16)
        context = Context(root=Path(folder) / "x", data=data)
        start = time.process_time()
        QuantizeStatic(calibration_samples=count, observer=observer)(model, at(context, "int8"))
        seconds = time.process_time() - start
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, seconds


class Shifted(TensorDataset):
    """One image, shifted by each index: samples that take no memory."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tensors[0][0].roll((index, index // SIDE), (1, 2)), torch.tensor(0)
