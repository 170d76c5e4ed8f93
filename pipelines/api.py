"""The Python API: `Pipeline.from_yaml("pipeline.yaml").run("results")`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.common.factories import refuse_in_import
from compress.pipelines.config.pipeline import PipelineConfig

if TYPE_CHECKING:
    from compress.pipelines.config.run_options import RunOptions
    from compress.pipelines.results.schema import Report


class Pipeline(PipelineConfig):
    """A pipeline file that can be run."""

    def run(
        self, out: Path | str | None = None, options: RunOptions | None = None, **changes: Any
    ) -> Report:
        """Run the stages and write the report.

        Args:
            out: folder of the results; `runs/<name>` by default.
            options: what to run again, where to run it, and who is notified.
            **changes: fields of the options, such as `until="int8"`.

        Raises:
            GateRefused: a gate refused and no stage failed; the report is written, and the artifact
                kept.
            CompressError: the pipeline is invalid, or a stage failed; then the report says so.
        """
        refuse_in_import()  # it would wait for the run that imports it
        # Importing the runner imports torch, which reading and checking a file do not need.
        from compress.pipelines.config.run_options import RunOptions
        from compress.pipelines.reporting.html import render
        from compress.pipelines.runner.run import run
        from compress.pipelines.system.signals import only_signals_interrupt

        options = replace(options or RunOptions(), **changes)
        with only_signals_interrupt():
            return run(self, self.default_out if out is None else Path(out), options, render)
