"""Checks a run's data: too few samples, samples in two splits, inputs of another range."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import torch

from compress.core.diagnosis.input_ranges import SAMPLES, UNLIKE, input_ranges, unlikeness
from compress.core.metrics import REGRESSION_METRICS, MetricMeter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from compress.core.metric_kinds.score import Score
    from compress.core.metrics import Metric
    from compress.data.fingerprint import Contents
    from compress.data.splits import Splits

MIN_VAL_SAMPLES = 30
"""Of `val`: with fewer, one sample moves an accuracy by more than three points."""


def validation_data_warnings(contents: Contents) -> Iterator[str]:
    """Yield a line for each reason not to trust the data, or what is measured on `val`."""
    if contents.unrepeatable:
        names = " and ".join(map(repr, sorted(contents.unrepeatable)))
        yield (
            f"the same sample of split {names} differs each time it is read, whatever the seed: "
            "runs cannot be repeated, and the cache knows the data by what the dataset holds and "
            "its code; draw from torch, numpy.random, random, or generators that the dataset keeps "
            "as attributes, instead of the operating system, the time or one made anew each time"
        )
    facts = contents.facts
    labelled = int(facts["val"].rows["labelled"].sum()) if "val" in facts else 0
    # Without any target, none is needed.
    samples = labelled or contents.lengths.get("val", MIN_VAL_SAMPLES)
    with_label = " with a label" if samples < contents.lengths.get("val", 0) else ""
    if samples < MIN_VAL_SAMPLES:
        yield (
            f"val has {samples} samples{with_label}, so that one of them moves an accuracy by "
            f"{100 / samples:.2g} points; use at least {MIN_VAL_SAMPLES}"
        )
    splits = [name for name in dict.fromkeys(("val", "test", *facts)) if name in facts]
    for measured, other in combinations(splits, 2):
        # Calibration and training may share what is never measured on.
        if measured in ("val", "test") and (shared := facts[measured].shared_with(facts[other])):
            exact = all(len(facts[n].rows) == contents.lengths[n] for n in (measured, other))
            yield (
                f"{measured} shares {'' if exact else 'at least '}{shared} of its "
                f"{contents.lengths[measured]} samples with {other}, so that it tells less of new "
                "data; keep each sample in one split"
            )


def unlike_test(name: str, metric: str, on_val: Score, on_test: Score) -> str:
    """Describe how a metric on `test` differs from that on `val` beyond both intervals, or ''."""
    intervals = [score.uncertainty().interval for score in (on_val, on_test)]
    if None in intervals or max(i[0] for i in intervals) <= min(i[1] for i in intervals):  # type: ignore[index]
        return ""
    shown = (
        f"{score.value:.4f} on {split} ({score.uncertainty().in_words()})"
        for split, score in (("val", on_val), ("test", on_test))
    )
    return (
        f"{name}: {metric} is {' and '.join(shown)}, beyond what chance explains: test and val are "
        "not samples of the same data, or val was trained on"
    )


def unlike_val(data: Splits, samples: int, seed: int) -> str:
    """Describe how the range of calibration inputs differs from that of `val`; else return ''.

    `samples` and `seed` are those that the calibration samples were drawn with.
    """
    if "val" not in data.datasets:
        return ""
    calibrated = input_ranges(data.calibration(samples, seed))
    evaluated = input_ranges(data.batches("val", limit=SAMPLES))
    if unlikeness(calibrated, evaluated) <= UNLIKE:
        return ""
    own, val = max(
        ((a, b) for a, b in zip(calibrated, evaluated, strict=True) if a and b),
        key=lambda pair: unlikeness(pair[:1], pair[1:]),
    )
    return (
        f"calibration inputs are {own.mean:.4g} ± {own.deviation:.4g} (mean and standard "
        f"deviation), val {val.mean:.4g} ± {val.deviation:.4g}: scale the samples of "
        f"{data.calibration_split} as those of val"
    )


def constant_score(data: Splits, metric: Metric) -> float | None:
    """Return the best metric on `val` of a constant output, as a baseline; None if there is none.

    For classes the output is their log-frequencies, for numbers the targets' mean or median.
    """
    if metric.name == "fidelity":
        return None
    # All targets, unlike outputs, are kept: the median needs them.
    batches = [b.target for b in data.batches("val") if b.target is not None]
    targets = [target for target in batches if isinstance(target, torch.Tensor)]
    if not targets or len(targets) < len(batches):
        return None
    try:
        metric = metric.with_inferred_loss(data)
        scores = []
        for row in _constant_outputs(torch.cat(targets), metric):
            meter = MetricMeter(metric)
            for batch in targets:
                meter.update(row.expand(len(batch), *row.shape[1:]), batch)
            scores.append(meter.compute())
    except Exception:  # noqa: BLE001 - a metric may want outputs of another form
        return None
    return max(scores) if metric.higher_is_better else min(scores)


def _constant_outputs(targets: torch.Tensor, metric: Metric) -> Iterator[torch.Tensor]:
    """Yield a sample's constant outputs, `(1, …)`; one scores best under each kind of metric."""
    if metric.loss.name == "binary_cross_entropy":
        targets = targets.float()  # also given as integers and booleans
    if not targets.is_floating_point():
        counts = torch.bincount(targets[targets >= 0].flatten().long(), minlength=2)
        # A class without a sample would have the logarithm of 0.
        scores = (counts / counts.sum()).clamp(min=1e-6).log()
        shape = (1, len(scores), *(1 for _ in targets.shape[1:]))
        yield scores.view(shape).expand(1, -1, *targets.shape[1:])
        return
    mean = targets.mean(0, keepdim=True)
    is_binary = bool(((targets == 0) | (targets == 1)).all())
    if is_binary and not (metric.loss.is_regression or metric.name in REGRESSION_METRICS):
        yield mean.logit(1e-6)  # models with binary targets output logits
        return
    yield mean
    yield targets.quantile(0.5, dim=0, keepdim=True)  # the best for mae
