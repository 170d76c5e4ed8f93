"""Benchmarks of the trainer on this machine: `python benchmarks/training.py [PART ...]`.

Parts: loops, speed, memory, communication, wire, patterns; all by default. Each prints a table, and
patterns writes its figures into docs/training-patterns.md. Speeds are ratios of times measured in
turn within one run; each process has one thread.
"""

import os
import sys
from importlib import import_module
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # when torch.profiler starts

PARTS = ("loops", "speed", "memory", "communication", "wire", "patterns")


def main(names: list[str]) -> None:
    unknown = set(names) - set(PARTS)
    if unknown:
        sys.exit(f"unknown part {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    sys.path.insert(0, str(Path(__file__).parent))
    for name in names or PARTS:
        import_module(f"trainer.{name}").main()
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
