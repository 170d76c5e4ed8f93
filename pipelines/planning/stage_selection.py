"""Selects stages for `--from` (a stage and its dependents) and `--until` (and what it needs)."""

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
    """Return the named stages and all those that they and their gates need."""
    selected = {*names}
    for planned in reversed(stages):
        if planned.name in selected:
            selected.update(planned.needs)
    return tuple(planned for planned in stages if planned.name in selected)


def downstream_of(stages: Stages, names: Collection[str]) -> frozenset[str]:
    """Return the names, and those of all stages whose artifacts are made from theirs."""
    selected = {*names}
    for planned in stages:
        if not selected.isdisjoint(planned.reads):
            selected.add(planned.name)
    return frozenset(selected)


def stage_named(pipeline: PipelineConfig, stages: Stages, option: str, name: str) -> frozenset[str]:
    """Return the stages that a name stands for: itself, or all branches of a stage with a matrix.

    Raises:
        PipelineInvalid: there is no such stage.
    """
    in_file = {p.name: pipeline.name_in_file(p.index) for p in stages}
    if name in in_file:
        return frozenset([name])
    branches = frozenset(branch for branch, written in in_file.items() if written == name)
    if not branches:
        mend = did_you_mean(name, {*in_file, *in_file.values()})
        raise PipelineInvalid(f"{option} {name!r}: no such stage; {mend}")
    return branches
