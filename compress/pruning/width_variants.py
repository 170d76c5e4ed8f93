"""Variants of a model with other widths, on which latency is studied; they answer nothing well."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from compress.artifacts.recipe import KeepIndices
from compress.pruning.allocation.ranking import rank
from compress.pruning.allocation.ratios import Limits
from compress.pruning.verification.masked_equivalence import sliced_copy
from compress.pruning.verification.module_rewrites import rewrite_

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from compress.artifacts.eager_model import EagerModel

LARGEST_CUT = 0.8
"""Largest fraction of a group's channels that a variant lacks."""
TRIES = 10
"""Draws of a group's width, so that it differs from those of the variants before."""


def width_variants(
    model: EagerModel,
    folder: Path,
    count: int,
    *,
    round_to: int = 16,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    across_norms: bool = False,
    seed: int = 0,
) -> Iterator[tuple[dict[str, int], EagerModel]]:
    """Yield models in which each group of coupled channels is cut to a random width.

    Yields:
        The channels that are left by the group's name, and the model, an artifact in `folder`. The
        first one is the whole model.

    Raises:
        PipelineInvalid: a pattern matches no module.
        StageFailed: the model cannot be traced.
    """
    module, inputs = model.load(), model.signature.example(seed=seed)
    rewrites = rewrite_(module, inputs, across_norms=across_norms)
    ranking = rank(
        module,
        inputs,
        "random",
        include=include,
        exclude=exclude,
        across_norms=across_norms,
        seed=seed,
    )
    widths = {one.group.name: len(one.scores) for one in ranking.ranked}
    yield widths, model
    generator, limits = random.Random(seed), Limits(round_to=round_to)
    used: list[set[int]] = [set() for _ in ranking.ranked]
    for number in range(1, count):
        keep = []
        for i, before in enumerate(used):
            for _ in range(TRIES):
                width = ranking.allocate(generator.uniform(0, LARGEST_CUT), limits)[i]
                if width not in before:
                    break
            before.add(width)
            keep.append(width)
        plan = ranking.verify(keep)
        cut = {one.group.name: len(one.group.channels) - len(one.removed) for one in plan.groups}
        sliced = sliced_copy(module, plan.kept, plan.attributes)
        edit = KeepIndices(kept=plan.kept, attributes=dict(plan.attributes))
        yield (
            widths | cut,
            model.derive(folder / f"variant{number}", sliced, edits=[*rewrites, edit]),
        )
