"""Checks gates that compare with the float model in another runtime: `against: onnxruntime`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import export  # noqa: F401 - adds the runtimes that it can open
from compress.common.errors import PipelineInvalid, Unavailable
from compress.core.baselines import BASELINES
from pipelines.config.validation_errors import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Set

    from compress.core.gate import Gate
    from pipelines.config.pipeline import PipelineConfig


def check_runtime(pipeline: PipelineConfig, index: int, number: int, earlier: Set[str]) -> None:
    """Refuse an `against` that names neither an earlier stage nor a runtime of the float model.

    A runtime's name is refused too where a stage that is not earlier has it: it would be ambiguous.

    Args:
        pipeline: the pipeline.
        index: position of the stage.
        number: position of the gate in the stage.
        earlier: names of the stages before it, and `source`.

    Raises:
        PipelineInvalid: one line with the place.
    """
    gate = pipeline.stages[index].gates[number]
    name = str(gate.against)
    where = pipeline.place("stages", index, "gates", number, "against")
    if name not in BASELINES or not gate.allows_runtime:
        known = {*earlier, *(BASELINES if gate.allows_runtime else ())}
        raise PipelineInvalid(
            f"{where}: no earlier stage is named {name!r}; {did_you_mean(name, known)}"
        )
    if name in {stage.title for stage in pipeline.stages}:
        raise PipelineInvalid(
            f"{where}: {name!r} is a runtime, and a stage that is not earlier has that name; "
            "rename the stage"
        )
    takes = BASELINES[name].artifact_kinds
    if pipeline.model.kind not in takes:
        raise PipelineInvalid(
            f"{where}: {name} runs {' and '.join(sorted(takes))} models, and this one comes in as "
            f"{pipeline.model.kind}; name an earlier stage, or `source`"
        )


def refuse_missing_runtime(pipeline: PipelineConfig, gate: Gate, where: str) -> None:
    """Refuse a gate whose runtime is not installed.

    Raises:
        Unavailable: one line with the place, and what to install.
    """
    stages = {stage.title for stage in pipeline.stages}
    if gate.against not in BASELINES or gate.against in stages:
        return
    for need in BASELINES[gate.against].requirements:
        if need.missing():
            raise Unavailable(
                f"{where}: against {gate.against} needs {need.what}, which is not here; "
                f"{need.install}"
            )
