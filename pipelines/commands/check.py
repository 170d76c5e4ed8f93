"""What is refused without running a stage: the file, and unless told otherwise the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.config.pipeline import PipelineConfig
from pipelines.planning.planner import build_plan
from pipelines.planning.unjudged_losses import advice

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class CheckResult:
    """A valid pipeline, described."""

    content: dict[str, Any]
    """For machines; `signature` is None where the model was left out."""
    lines: list[str]
    """For people."""
    warnings: tuple[str, ...]


def check_pipeline(file: Path, models: bool) -> CheckResult:
    """Return a description of a pipeline file that is valid.

    Args:
        file: the pipeline file.
        models: whether the model is built and the data are loaded, which takes importing torch.

    Raises:
        CompressError: it is not.
    """
    pipeline = PipelineConfig.from_yaml(file)
    plan = build_plan(pipeline)
    signature, told = None, ""
    if models:
        from pipelines.runner.inputs import check_model

        found, told = check_model(pipeline)
        signature = found.model_dump(mode="json")
    warnings = plan.warnings
    if pipeline.data is not None:
        warnings += advice(plan)
    content = {"valid": True, **plan.described(), "warnings": warnings, "signature": signature}
    how = "" if models else "; the model and the data were left out"
    line = f"{file}: valid ({plan.route}){how}"
    return CheckResult(content, [*told.splitlines(), line], warnings)
