"""Rows of a pipeline's `val`, for `compress serve --shadow-reference`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from compress.common.errors import PipelineInvalid

MOST_ROWS = 2000  # the server calls the model on all of them before it is ready


@contextmanager
def reference_rows(given: Path | None) -> Iterator[Path | None]:
    """Provide the file that is given; of a pipeline file, one of up to 2,000 rows of its `val`.

    PipelineInvalid for a pipeline without `val`.
    """
    if given is None or given.suffix not in (".yaml", ".yml"):
        yield given
        return
    from compress.pipelines.config.pipeline import PipelineConfig
    from compress.pipelines.runner.inputs import resolve_inputs
    from compress.pipelines.system.temp_files import temporary_files
    from compress.serve.worker.wire import to_npz

    with temporary_files(), TemporaryDirectory(prefix="compress-rows-") as folder:
        pipeline, data, _ = resolve_inputs(PipelineConfig.from_yaml(given))
        if data is None or "val" not in data.datasets:
            raise PipelineInvalid(f"{given}: there is no `val` in `data:` to compare requests with")
        batch = next(data.batches("val", MOST_ROWS, MOST_ROWS))
        names = [spec.name for spec in pipeline.model.inputs or ()]
        arrays = {name: x.numpy() for name, x in zip(names, batch.inputs, strict=True)}
        (rows := Path(folder) / "val.npz").write_bytes(to_npz(arrays))
        yield rows
