"""The solver of `compress auto` beside the true optimum and Optuna's TPE, on spaces made once.

    python benchmarks/auto.py build [A|B|C]    # makes every model of the spaces: an hour each
    python benchmarks/auto.py                  # needs `pip install optuna` (5.0), the baseline

A is a chain of five convolutions, B the ResNet-20 with layers in float or int8, both on digits, and
C a text encoder. Each model is cut once, refitted on 128 samples and not trained;
`benchmarks/auto_space_*.json` has the loss and the latency of each. Regret is the cross-entropy of
the best model found within a share of the whole model's latency, beyond that of the best one there
is; a check reveals one model's true figures.

What was made stays in `benchmarks/runs`, so that a build that was stopped goes on. `build B losses`
makes what needs no timing, and may run in several processes at once; `build B latencies 240`
measures for 240 seconds, on a machine that does nothing else.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
HERE = Path(__file__).parent
sys.path[:1] = [str(HERE.parent), str(HERE)]

import torch  # noqa: E402
from auto_search.build import build  # noqa: E402
from auto_search.spaces import SPACES  # noqa: E402


def main() -> None:
    torch.set_num_threads(1)
    match sys.argv[1:]:
        case []:
            from auto_search.regrets import compare

            for space in SPACES.values():
                if space.file.exists():
                    compare(space)
                else:
                    print(f"\n{space.name} is not built")
        case ["build", *rest]:
            names = [rest.pop(0)] if rest else [*SPACES]
            for name in names:
                build(SPACES[name], HERE / "runs" / f"auto-{name}", *rest)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
