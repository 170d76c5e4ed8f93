"""What `--from` and `--until` mean: a stage and what is made of it, a stage and what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.errors import PipelineInvalid
from pipelines.config.validation_errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Collection

    from pipelines.config.pipeline import PipelineConfig
    from pipelines.planning.plan import PlannedStage

Stages = tuple["PlannedStage", ...]


def upstream_of(stages: Stages, names: Collection[str]) -> Stages:
    """Return the stages of some names, and those without which they are not made and judged."""
    found = {*names}
    for planned in reversed(stages):
        if planned.name in found:
            found.update(planned.needs)
    return tuple(planned for planned in stages if planned.name in found)


def downstream_of(stages: Stages, names: Collection[str]) -> frozenset[str]:
    """Return some names, and those of the stages whose artifacts are made of theirs."""
    found = {*names}
    for planned in stages:
        if not found.isdisjoint(planned.reads):
            found.add(planned.name)
    return frozenset(found)


def stage_named(pipeline: PipelineConfig, stages: Stages, option: str, name: str) -> frozenset[str]:
    """Return the names of the stages that one means: all branches where the file's has several.

    Raises:
        PipelineInvalid: there is no such stage.
    """
    in_file = {p.name: pipeline.name_in_file(p.index) for p in stages}
    if name in in_file:
        return frozenset([name])
    found = frozenset(branch for branch, written in in_file.items() if written == name)
    if not found:
        mend = did_you_mean(name, {*in_file, *in_file.values()})
        raise PipelineInvalid(f"{option} {name!r}: no such stage; {mend}")
    return found
