"""A model cut to widths at random, on which latency is studied; the results answer nothing well."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from compress.artifacts.recipe import KeepIndices
from compress.pruning.allocation.ranking import rank
from compress.pruning.channel_settings import ChannelSelection
from compress.pruning.importance.taylor import ScoringSamples
from compress.pruning.verification.masked_equivalence import sliced_copy
from compress.pruning.verification.module_rewrites import rewrite_
from compress.pruning.verification.verification_inputs import VerificationInputs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from compress.artifacts.eager_model import EagerModel

LARGEST_CUT = 0.8
"""Largest fraction of a group's channels that a variant lacks."""
TRIES = 10
"""Draws of a group's width, so that it differs from those of the variants before."""


class WidthVariants:
    """The groups of coupled channels of a model that can be cut, and models of other widths."""

    def __init__(
        self, model: EagerModel, selection: ChannelSelection | None = None, seed: int = 0
    ) -> None:
        """Trace the model, and find the groups whose cut is verified.

        Raises:
            PipelineInvalid: a pattern matches no module.
            StageFailed: the model cannot be traced.
        """
        module, self._model, self._seed = model.load(), model, seed
        selection = selection or ChannelSelection()
        example = model.signature.example(seed=seed)
        inputs = VerificationInputs(example, across_norms=selection.across_norms)
        self._rewrites = rewrite_(module, inputs)
        unranked = selection.model_copy(update={"importance": "random"})
        ranking = rank(module, inputs, unranked, ScoringSamples(seed=seed))
        smallest = ranking.verify(ranking.allocate(LARGEST_CUT, ChannelSelection(round_to=1)))
        groups = {one.group.name for one in ranking.ranked}
        stay = groups - {one.group.name for one in smallest.groups}
        self._ranking = ranking.without(stay, smallest.pinned)
        self.whole = {one.group.name: len(one.scores) for one in self._ranking.ranked}
        """The model's own widths: group → its channels."""

    @property
    def is_rewritten(self) -> bool:
        """Whether variants have other modules than the model, as pruning needs them."""
        return bool(self._rewrites)

    def draw(self, count: int, round_to: int = 1) -> list[dict[str, int]]:
        """Draw widths at random; those of a group differ from each other as far as they can."""
        generator, limits = random.Random(self._seed), ChannelSelection(round_to=round_to)
        used: dict[str, set[int]] = {group: set() for group in self.whole}
        drawn = []
        for _ in range(count):
            widths = {}
            for i, (group, before) in enumerate(used.items()):
                for _ in range(TRIES):
                    ratio = generator.uniform(0, LARGEST_CUT)
                    widths[group] = self._ranking.allocate(ratio, limits)[i]
                    if widths[group] not in before:
                        break
                before.add(widths[group])
            drawn.append(widths)
        return drawn

    def build(self, widths: Mapping[str, int], folder: Path) -> tuple[dict[str, int], EagerModel]:
        """Cut the model; return the widths that are left, and the artifact in `folder`."""
        ranking = self._ranking
        plan = ranking.verify([widths[one.group.name] for one in ranking.ranked])
        cut = {one.group.name: len(one.group.channels) - len(one.removed) for one in plan.groups}
        sliced = sliced_copy(ranking.module, plan.kept, plan.attributes)
        edit = KeepIndices(kept=plan.kept, attributes=dict(plan.attributes))
        edits = [*self._rewrites, edit]
        return self.whole | cut, self._model.derive(folder, sliced, edits=edits)

    def build_some(
        self, count: int, folder: Path, round_to: int = 1
    ) -> Iterator[tuple[dict[str, int], EagerModel]]:
        """Yield models of random widths, each after it is asked for, in folders of `folder`."""
        for number, widths in enumerate(self.draw(count, round_to)):
            yield self.build(widths, folder / f"variant{number}")
