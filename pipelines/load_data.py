"""`compress.load_data`: images, tables and arrays as splits, from Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from compress.common.errors import PipelineInvalid
from compress.core.validation_errors import dotted, explain
from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.runner import inputs

if TYPE_CHECKING:
    from compress.data.splits import Splits


def load_data(*, model: Mapping[str, Any] | Path | str | None = None, **section: Any) -> Splits:
    """Return the splits of data without code, as the section `data:` of a pipeline file names them.

        data = compress.load_data(images="photos", model="vit", split={"val": 0.2})
        small = compress.quantize_static(module, data=data)

    Args:
        model: whose files say how images or texts are prepared: a Hugging Face folder, or what a
            pipeline file says under `model:`, such as `{"timm": "resnet18"}`.
        **section: settings of `data:`: `images`, `audio`, `table`, `arrays` or `huggingface`, with
            `split`, `label`, `prepare` and so on. Paths are relative to the working directory.

    Raises:
        PipelineInvalid: a setting is unknown, or files are not as the settings say.
    """
    described: Any = {"factory": "torch.nn:Identity"} if model is None else model
    if isinstance(described, Path | str):
        described = {"huggingface": str(described)}
    section = {n: str(value) if isinstance(value, Path) else value for n, value in section.items()}
    stages = [{"stage": "export_program"}]
    content = {"version": 1, "model": described, "data": section, "stages": stages}
    try:
        pipeline = PipelineConfig.model_validate(content)
    except ValidationError as error:
        raise PipelineInvalid(explain(error, content, PipelineConfig, dotted)) from None
    splits = inputs.load_data(pipeline)
    assert splits is not None
    return splits
