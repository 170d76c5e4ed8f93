"""The gate `runs_in`: whether a file answers in a browser as it does in this process."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, JsonValue

from compress.common.config import Count
from compress.common.errors import StageFailed
from compress.core.gates.gate import Gate

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.common.requirements import Requirement
    from compress.core.context import Context

logger = logging.getLogger(__name__)


class RunsIn(Gate):
    """The file runs in another runtime, and answers there as it does here, on samples of `val`.

    `web`: in a browser, by onnxruntime-web in a headless Chromium, for results of `export_onnx`.
    The latency there is logged.
    """

    gate: Literal["runs_in"] = "runs_in"
    runtime: Literal["web"] = "web"
    """Where the file is to run."""
    atol: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Largest absolute difference allowed between its outputs there and in this process."""
    batch: Count = 1
    """Samples per call."""

    limit_field = "atol"
    rule_template = "max |difference| in runtime {runtime} <= {atol:g}"
    compares = False

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """onnxruntime-web, and the browser."""
        from compress.export.web.page import CHROMIUM, ONNXRUNTIME_WEB

        return ONNXRUNTIME_WEB, CHROMIUM

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the largest absolute difference to the answers in this process."""
        from compress.export.web.page import run_in_browser

        if problem := self.unsuitable_artifact(type(after)):
            raise StageFailed(problem)
        where, found = run_in_browser(after, context.measured_batches(after.signature, self.batch))
        logger.info(
            "%s: a call of %d takes %.3g ms (median), %.3g ms (90th percentile)",
            *(where, self.batch, found["p50_ms"], found["p90_ms"]),
        )
        if found["difference"] is None:
            raise StageFailed(f"an output is NaN or of another shape in {where}")
        return float(found["difference"])

    def unsuitable_artifact(self, written: type[Artifact]) -> str:
        """Return why the runtime cannot open such a result."""
        is_onnx = written.kind == "onnx"
        return "" if is_onnx else f"{self.runtime} runs onnx files, found {written.kind}"

    def measurement_key(self) -> dict[str, JsonValue]:
        """Return what changes the value."""
        from compress.export.web.page import ONNXRUNTIME_WEB

        return {**super().measurement_key(), "onnxruntime-web": ONNXRUNTIME_WEB.version()}
