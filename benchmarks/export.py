"""What an export costs and brings, measured here: `python benchmarks/export.py PART`.

Parts: `formats` (latency of every format over eager, time and memory of the export, time to load)
`coverage` (the zoo in every format) and `tensorrt` (the zoo built by TensorRT for RTX, and not
run), both in docs/coverage.md.
`PART --help` tells the options; `--small` is a quick look. One thread.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")

PARTS = ("formats", "coverage", "tensorrt")


def main() -> None:
    if sys.argv[1:2] == [] or sys.argv[1] not in PARTS:
        sys.exit(f"{__doc__}\nchoose a part: {', '.join(PARTS)}")
    here = Path(__file__).parent
    sys.path[:1] = [str(here.parent), str(here)]  # `export` is the package, not this file
    part = sys.argv.pop(1)
    import_module(f"exporter.{part}").main()


if __name__ == "__main__":
    main()
