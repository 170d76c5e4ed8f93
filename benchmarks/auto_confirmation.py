"""How far the best of many models flatters itself: a search's choice, with 100 halvings of `val`.

    compress auto examples/digits/auto.yaml --out search
    python benchmarks/auto_confirmation.py examples/digits/auto.yaml search

For each seed, `val` is halved at random. One half chooses the fastest model that keeps `max_drop`;
with confirmation the fastest that keeps it on the other half, too, as `compress auto` does. `test`,
which neither saw, tells how often the chosen model loses more than that. For accuracy alone.
"""

import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from compress.pipelines.auto.candidate_evaluator import CandidateEvaluator
from compress.pipelines.auto.front import Front
from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.config.run_options import RunOptions

SEEDS = range(100)


def main() -> None:
    file, folder = map(Path, sys.argv[1:])
    pipeline, front = PipelineConfig.from_yaml(file), Front.read(folder)
    evaluator = CandidateEvaluator.from_pipeline(pipeline, pipeline.auto, folder, RunOptions())
    found = sorted(front.checked, key=lambda model: model.latency_ms)
    right = {split: [hits(evaluator, model, split) for model in found] for split in ("val", "test")}
    whole = next(i for i, model in enumerate(found) if model.name == "float-whole")
    most, size = front.limits.max_drop, len(right["val"][0])

    def drop(model: int, split: str, rows=slice(None)) -> float:
        own, before = (right[split][i][rows].double().mean() for i in (model, whole))
        return 100 * float(before - own)

    print(f"{len(found)} models, max_drop {most:g}, {size} samples of val in two halves")
    for confirms in (False, True):
        on_other, on_test = [], []
        for seed in SEEDS:
            order = random.Random(seed).sample(range(size), size)
            first, second = order[: size // 2], order[size // 2 :]
            good = [i for i in range(len(found)) if drop(i, "val", first) <= most]
            good = [i for i in good if not confirms or drop(i, "val", second) <= most]
            if good:
                on_other.append(drop(good[0], "val", second))
                on_test.append(drop(good[0], "test"))
        over = [sum(one > most for one in drops) for drops in (on_other, on_test)]
        print(
            f"{'confirmed' if confirms else 'by one half alone'}: a model in {len(on_test)} of "
            f"{len(SEEDS)} seeds, beyond the limit on the other half in {over[0]}, on test in "
            f"{over[1]}, mean drop on test {statistics.fmean(on_test):.2f} points"
        )


def hits(evaluator: CandidateEvaluator, model, split: str) -> torch.Tensor:
    """Return for each sample of a split whether a checked model's label is right."""
    found = []
    with evaluator.context.predictor(evaluator.artifact(model.candidate)) as predict:
        for batch in evaluator.context.data.batches(split):
            found.append(predict(*batch.inputs)[0].argmax(1) == batch.target)
    return torch.cat(found)


if __name__ == "__main__":
    main()
