"""What pruning keeps and brings, measured here: `python benchmarks/pruning.py PART [options]`.

Parts: `digits` (accuracy against multiply-accumulates and latency, beside Torch-Pruning), `minilm`
(a sentence encoder without a training step), `distillation` and `cost` (of the axis graph).
`PART --help` tells the options; `--small` is a quick look. One thread.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by trainings

PARTS = ("digits", "minilm", "distillation", "cost")


def main() -> None:
    if sys.argv[1:2] == [] or sys.argv[1] not in PARTS:
        sys.exit(f"{__doc__}\nchoose a part: {', '.join(PARTS)}")
    here = Path(__file__).parent
    sys.path[:1] = [str(here.parent), str(here)]  # `export` is the package, not the file here
    part = sys.argv.pop(1)
    import_module(f"pruner.{part}").main()


if __name__ == "__main__":
    main()
