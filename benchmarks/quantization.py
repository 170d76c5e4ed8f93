"""Accuracy, size and speed of quantized models: `python benchmarks/quantization.py PART`.

Parts: `shapes` (latency of ResNet-18 and -50 shapes), `minilm` (a sentence encoder in 8 and 4
bits), `hard` (PTQ against QAT at 8 and 4 bits) and `memory` (of calibration). Other tools are
compared by `benchmarks/peers.py`.
`PART --help` lists the options; `--small` is a quick look. One thread.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by trainings

PARTS = ("shapes", "minilm", "hard", "memory")


def main() -> None:
    if sys.argv[1:2] == [] or sys.argv[1] not in PARTS:
        sys.exit(f"{__doc__}\nchoose a part: {', '.join(PARTS)}")
    here = Path(__file__).parent
    sys.path[:1] = [str(here.parent), str(here)]  # `export` is the package, not the file here
    part = sys.argv.pop(1)
    import_module(f"quantizer.{part}").main()


if __name__ == "__main__":
    main()
