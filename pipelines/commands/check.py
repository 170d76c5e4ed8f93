"""`compress check`: validate a pipeline file, its model and its data without running a stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.planning.plan import advice
from compress.pipelines.planning.planner import build_plan


class CheckResult(NamedTuple):
    """Description of a valid pipeline."""

    content: dict[str, Any]
    """Content of `--json`; `signature` is None with `--quick`."""
    lines: list[str]
    """Output without `--json`."""
    warnings: tuple[str, ...]


def check_pipeline(file: Path, models: bool) -> CheckResult:
    """Validate a pipeline file and describe it; with `models` its model and data too."""
    pipeline = PipelineConfig.from_yaml(file)
    plan = build_plan(pipeline)
    signature, summary, warnings = None, "", plan.warnings
    if models:
        from compress.pipelines.runner.inputs import checked_model

        found = checked_model(pipeline)
        signature, summary = found.signature.model_dump(mode="json"), found.summary
        warnings += (found.signature.state.line(),) if found.signature.state else ()
    if pipeline.data is not None:
        warnings += advice(plan)
    stages = [{"name": p.name, "stage": p.stage.stage, "input": p.input} for p in plan.stages]
    content = {"valid": True, "stages": stages, "warnings": warnings, "signature": signature}
    how = "" if models else "; the model and the data were left out"
    line = f"{file}: valid ({plan.route}){how}"
    return CheckResult(content, [*summary.splitlines(), line], warnings)
