"""Search which corrections of a static quantization leave the least noise in a model's outputs."""

from __future__ import annotations

import logging
import operator
from typing import TYPE_CHECKING, Any

import torch

from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs
from compress.quantization.algorithms.layer_corrections import RELU
from compress.quantization.numeric_debug.sqnr import Deviation
from compress.quantization.pt2e.quantizer import (
    BATCH_NORM,
    CONVOLUTIONS,
    LINEAR,
    is_sequence_linear,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch.fx import GraphModule, Node

    from compress.data.batch import Batch

logger = logging.getLogger(__name__)

CANDIDATES: tuple[dict[str, Any], ...] = (
    {"bias_correction": True},
    {"observer": "mse"},
    {"equalize": True},
    {"smooth": "auto"},
)
"""Settings of `quantize_static`, each tried upon those that were kept before it.

The bias comes first: EfficientNet-Lite0 gains 6 dB by it, and half a dB by ranges alone. AdaRound
is left out: with weights of 8 bits it gains next to nothing for minutes of its own.
"""
ROWS = 32
"""Samples at most that ranges are found on, and as many more that noise is measured on."""
LEAST_GAIN_DB = 0.1
"""A correction that gains less is left out: over so few rows it may as well be chance."""


def search_corrections(
    model: torch.nn.Module,
    batches: Iterable[Batch],
    quantized: Callable[[Mapping[str, Any], list[Batch]], GraphModule],
    candidates: Iterable[dict[str, Any]],
) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the settings with the least output noise, and the SQNR of each trial in dB.

    Args:
        model: the float model.
        batches: calibration samples; ranges are found on every other batch until there are `ROWS`,
            and noise is measured on as many that no range has seen.
        quantized: settings and samples → the model quantized with them.
        candidates: changes of settings, each kept where it gains.
    """
    seen, held_out = halves(batches)
    with torch.inference_mode():
        expected = [flatten_outputs(model(*batch.inputs)) for batch in held_out]

    def sqnr(settings: Mapping[str, Any]) -> float:
        graph = quantized(settings, seen)
        deviations = [Deviation() for _ in expected[0]]
        with torch.inference_mode():
            for batch, outputs in zip(held_out, expected, strict=True):
                found = flatten_outputs(graph(*batch.inputs))
                for deviation, a, b in zip(deviations, outputs, found, strict=True):
                    deviation.add(a, b)
        # The mean over outputs: boxes in pixels would drown out probabilities in a sum of squares.
        return sum(deviation.sqnr_db for deviation in deviations) / len(deviations)

    chosen: dict[str, Any] = {}
    best = sqnr(chosen)
    tried = {"none": round(best, 2)}
    for candidate in candidates:
        settings = chosen | candidate
        decibels = sqnr(settings)
        tried[", ".join(f"{name}: {value}" for name, value in settings.items())] = round(
            decibels, 2
        )
        if decibels >= best + LEAST_GAIN_DB:
            chosen, best = settings, decibels
    logger.info("corrections: %s, of %s dB", chosen or "none", tried)
    return chosen, tried


def useful_candidates(graph: GraphModule) -> list[dict[str, Any]]:
    """Return the candidates that can change a captured graph: a trial costs a calibration."""
    nodes = graph.graph.nodes
    useless = set[str]()
    if not any(is_sequence_linear(node) for node in nodes if node.target is LINEAR):
        useless.add("smooth")
    if not any(_reads_convolution(node) for node in nodes if node.target in CONVOLUTIONS):
        useless.add("equalize")
    return [candidate for candidate in CANDIDATES if useless.isdisjoint(candidate)]


def _reads_convolution(node: Node) -> bool:
    before: Any = node.args[0]
    # BatchNorms, of whose outputs the first is taken, are folded before layers are equalized.
    while before.target in (RELU, BATCH_NORM, operator.getitem):
        before = before.args[0]
    return before.target in CONVOLUTIONS


def halves(batches: Iterable[Batch], rows: int = ROWS) -> tuple[list[Batch], list[Batch]]:
    """Return batches by turns: some to find ranges on, others to measure noise on.

    Raises:
        StageFailed: there is but one batch.
    """
    parts: tuple[list[Batch], list[Batch]] = ([], [])
    counts = [0, 0]
    for batch in batches:
        place = counts.index(min(counts))
        parts[place].append(batch)
        counts[place] += len(batch)
        if min(counts) >= rows:
            break
    if not parts[1]:
        raise StageFailed(
            f"corrections: auto measures noise on samples that no range was found on, and all "
            f"{counts[0]} are one batch of the model; bring at least two batches"
        )
    return parts
