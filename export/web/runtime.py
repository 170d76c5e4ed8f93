"""Runs an ONNX file in a browser on this machine, and compares its answers with ONNX Runtime's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from compress.common.errors import StageFailed
from compress.core.gates.runtime import OTHER_RUNTIMES, OtherRun, OtherRuntime
from compress.export.web.browser import CHROMIUM, ONNXRUNTIME_WEB, REPORT, run_page

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from compress.artifacts.artifact import Artifact


def run_in_browser(model: Artifact, batches: Sequence[tuple[torch.Tensor, ...]]) -> OtherRun:
    """Run an artifact's file in a headless Chromium on batches of one size, and measure it.

    Raises:
        Unavailable: Chromium or onnxruntime-web is missing.
        StageFailed: the file does not run there.
    """
    from compress.export.web.page import web_page
    from compress.profiling.benchmark import MEASURED_SECONDS

    sizes = {len(batches[0][0]): batches}
    page = web_page(model.path.name, model, sizes, seconds=MEASURED_SECONDS, report=REPORT)
    found = run_page(page)
    where = f"onnxruntime-web {ONNXRUNTIME_WEB.version()} in {CHROMIUM.what}"
    if "error" in found:
        raise StageFailed(f"does not run in {where}: {found['error']}")
    (size,) = found["sizes"]
    difference = math.nan if size["difference"] is None else size["difference"]
    return OtherRun(difference, size["p50_ms"], size["p90_ms"], where)


WEB = OTHER_RUNTIMES["web"] = OtherRuntime(
    run=run_in_browser,
    artifact_kinds=frozenset({"onnx"}),
    requirements=(ONNXRUNTIME_WEB, CHROMIUM),
    versions=lambda: {"onnxruntime-web": ONNXRUNTIME_WEB.version()},
)
"""The runtime `web` of the gate `runs_in`."""
