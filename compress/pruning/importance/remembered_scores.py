"""Scores of channels, remembered while one model is cut again and again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from compress.common.forward import bytes_of
from compress.pruning.channel_settings import FROM_DATA
from compress.pruning.importance.scores import ScoringSamples, score_groups

if TYPE_CHECKING:
    from torch import nn

    from compress.core.progress import Progress
    from compress.pruning.channel_settings import Criterion
    from compress.pruning.dependency.channel_groups import AxisGraph, ChannelGroup
    from compress.pruning.importance.scores import Scores

_remembered: dict[str, Scores] | None = None
"""What scores depend on, hashed → the scores; None outside of :func:`remembering_scores`."""


@contextmanager
def remembering_scores() -> Iterator[None]:
    """Score the channels of a module by data once in a block: candidates cut the same module.

    Scores do not depend on how many channels are to stay. A module that was cut has other weights.
    """
    global _remembered
    before, _remembered = _remembered, {}
    try:
        yield
    finally:
        _remembered = before


def known_or_scored(
    module: nn.Module,
    groups: Sequence[ChannelGroup],
    graph: AxisGraph,
    criterion: Criterion,
    samples: ScoringSamples,
    progress: Progress,
) -> Scores:
    """Return what :func:`score_groups` does, from memory where nothing that it depends on differs.

    Scores by weights alone are never remembered, as they take no time.
    """
    if _remembered is None or criterion not in FROM_DATA:
        return score_groups(module, groups, graph, criterion, samples, progress)
    key = _key(module, groups, criterion, samples)
    if key not in _remembered:
        _remembered[key] = score_groups(module, groups, graph, criterion, samples, progress)
    return list(_remembered[key])


def _key(
    module: nn.Module,
    groups: Sequence[ChannelGroup],
    criterion: Criterion,
    samples: ScoringSamples,
) -> str:
    """Hash what scores depend on: the model's structure and weights, the groups and the samples."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    tensors |= {
        f"sample {i}.{n}": tensor
        for i, batch in enumerate(samples.batches)
        for n, tensor in enumerate(batch.tensors())
    }
    settings = (samples.device, samples.seed, samples.loss)
    channels = [(group.slots, group.consumed_slots, group.channels) for group in groups]
    digest = hashlib.sha256(repr((criterion, settings, channels, module)).encode())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()
