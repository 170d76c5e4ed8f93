"""`pipeline.yaml` as typed, immutable settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import pydantic

from compress.common.config import Count, Settings
from compress.common.errors import PipelineInvalid
from compress.core.objectives.loss import LossName
from compress.core.objectives.task import TaskName
from compress.core.validation_errors import dotted, explain
from compress.pipelines.config import matrix
from compress.pipelines.config.auto_settings import AutoSettings
from compress.pipelines.config.data_spec import FILE_KEYS, DataSpec
from compress.pipelines.config.model_spec import SOURCE, ModelSpec
from compress.pipelines.config.registry import AnyStage, stages
from compress.pipelines.config.run_options import Judging
from compress.pipelines.config.yaml_source import Source, read

if TYPE_CHECKING:
    from compress.common.requirements import Requirement


class MetricSpec(Settings):
    """A metric with arguments."""

    name: str
    """accuracy, loss, fidelity, f1, miou, perplexity; for numbers mse, mae, r2, spearman; for boxes
    map; torchmetrics.… or module:callable."""
    arguments: dict[str, pydantic.JsonValue] = {}
    """Keyword arguments of torchmetrics, map, f1, miou, spearman, perplexity, or the callable."""
    higher_is_better: bool | None = None
    """Whether a larger value is better, for a metric that does not declare it itself."""


class Depends(Settings):
    """What results depend on, besides what a run notices by itself."""

    files: tuple[str, ...] = ()
    """Files, or folders with all files in them, relative to this file; for what user code reads
    through a C extension or another process."""
    environment: tuple[Annotated[str, pydantic.Field(pattern=r"^[^=]+$")], ...] = ()
    """Names of environment variables."""


class Tracker(Settings):
    """Where a run's settings, figures and report are written too; none of it changes a result."""

    kind: Literal["tensorboard", "mlflow"]
    """`tensorboard` writes an event file for each run, `mlflow` a run of the experiment
    `compress`. Each is an extra of that name."""
    uri: str | None = None
    """Folder, relative to that of the results (`tracking` by default); or MLflow's address."""

    @pydantic.model_validator(mode="after")
    def _uri_fits(self) -> Self:
        address = self.uri is not None and "://" in self.uri
        if address and self.kind == "tensorboard":
            raise ValueError("tensorboard writes to a folder, and uri is an address")
        if address and "@" in urlsplit(str(self.uri)).netloc:
            raise ValueError(
                "uri would show its password in logs and reports; put that into "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return self

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """What must be installed."""
        from compress.training.config.training import TRACKER_REQUIREMENTS

        return (TRACKER_REQUIREMENTS[self.kind],)


class PipelineConfig(Settings):
    """The steps from a model to deployable artifacts."""

    model_config = pydantic.ConfigDict(title="Pipeline")

    version: Literal[1]
    """Version of this file's format."""
    name: Annotated[str, pydantic.Field(pattern=r"^[A-Za-z0-9][\w.-]*$")] = "pipeline"
    """Name of the run; results go to runs/<name> by default. The file's name by default."""
    seed: Annotated[int, pydantic.Field(ge=0)] = 0
    """Seed of everything random."""
    device: Annotated[str, pydantic.Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """Where models run: cpu, cuda or cuda:0 …"""
    threads: Count = 1
    """CPU threads a model answers with, in every measurement alike."""
    served_batch_size: Count = 1
    """Rows of one call in deployment. Models whose answers depend on what else is in the batch are
    judged at that size; others at any."""
    judge: Judging = "full"
    """How much is measured: all that the report shows, or, with `quick`, little: the metric and a
    short latency of what is shipped alone, without a comparison with the imported model, and
    exports on 16 samples of `val`. Gates measure what they need in any case."""
    code: str = "."
    """Folder of the modules that factories name, relative to this file."""
    model: ModelSpec
    """The model to import."""
    data: DataSpec | None = None
    """The data; stages that train, calibrate or measure accuracy need it."""
    task: TaskName | None = None
    """What the model is for: the default loss and metric, and how answers are compared."""
    loss: LossName | None = None
    """What training minimizes, and the metric `loss` measures: `cross_entropy`,
    `binary_cross_entropy` (of logits), `nll` (of log-probabilities), `mse`, `l1`, `smooth_l1`, or
    `module:callable` (outputs, targets → scalar). By default it follows from the targets."""
    metric: MetricSpec | None = None
    """How good a model is: a name, or a name with arguments. By default `accuracy`, and `loss`
    where the model predicts numbers."""
    depends: Depends = Depends()
    """Files and environment variables that results depend on, where a run cannot notice it."""
    tracker: Tracker | None = None
    """Where settings, figures and the report of each run are written too."""
    auto: AutoSettings | None = None
    """What `compress auto` searches, after the stages; a run leaves it out."""
    stages: tuple[AnyStage, ...] = ()
    """The steps, in order."""

    _source: Source | None = pydantic.PrivateAttr(default=None)
    _written: Path | None = pydantic.PrivateAttr(default=None)
    """File that this was written to, with paths that are relative to that one's folder."""

    @pydantic.model_validator(mode="after")
    def _has_stages(self) -> Self:
        if not self.stages and self.auto is None:
            raise ValueError("stages: expected at least one stage, or a section `auto:`")
        return self

    @pydantic.field_validator("metric", mode="before")
    @classmethod
    def _metric_by_name(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    @classmethod
    def from_yaml(cls, path: Path | str) -> Self:
        """Read and validate a pipeline file, without torch; PipelineInvalid names each problem."""
        source = matrix.expand_matrices(read(Path(path)))
        try:
            pipeline = cls.model_validate({"name": source.path.stem, **source.content})
        except pydantic.ValidationError as error:
            raise PipelineInvalid(
                explain(error, source.content, cls, source.describe, source.written)
            ) from None
        matrix.refuse_duplicate_branches(pipeline.stages, source)
        pipeline._source = source
        return pipeline

    @property
    def file(self) -> str:
        """Path of the file that this was read from, or written to."""
        path = self._written or (self._source and self._source.path)
        return str(path) if path else "(a pipeline made in Python)"

    @property
    def folder(self) -> Path:
        """The folder that paths in the file are relative to."""
        return self._source.path.parent if self._source else Path()

    @property
    def default_out(self) -> Path:
        """The folder of the results where no other one is given."""
        return Path("runs") / self.name

    @property
    def code_folder(self) -> Path:
        """The folder of the user's modules."""
        return (self.folder / self.code).resolve()

    @property
    def source_kind(self) -> str:
        """The kind of artifact that the model becomes.

        An ONNX file stays one where all stages that read it take it so; else it becomes a module.
        """
        from compress.core.stage import members_of

        kind = self.model.kind
        if kind != "onnx":
            return kind
        readers = (
            stage
            for i, stage in enumerate(self.stages)
            if (stage.input or (SOURCE if not i else "")) == SOURCE
        )
        takes = all(kind in {k.kind for k in members_of(stage.reads())} for stage in readers)
        return kind if takes and self.auto is None else "eager"

    def name_in_file(self, index: int) -> str:
        """Return the name that the file gives a stage; branches of one stage have the same."""
        return self._source.name_of(index) if self._source else self.stages[index].title

    def place(self, *location: str | int) -> str:
        """Return the place of a setting for messages: the file, its line, and its name."""
        if self._source is None:
            return dotted(location)
        return f"{self._source.place(location)}: {dotted(self._source.written(location))}"


def relocated(content: dict[str, Any], folder: Path, to: Path) -> dict[str, Any]:
    """Return a pipeline file's content with paths relative to another folder."""

    def relative(path: str) -> str:
        return os.path.relpath((folder / path).resolve(), to.resolve())

    found = {**content, "code": relative(content.get("code", ".")), "model": {**content["model"]}}
    for name in ("checkpoint", "huggingface", "file"):
        if path := found["model"].get(name):
            found["model"][name] = relative(path)
    if data := content.get("data"):
        paths: dict[str, Any] = {key: relative(data[key]) for key in FILE_KEYS if key in data}
        if tokenizer := (data.get("prepare") or {}).get("tokenizer"):
            paths["prepare"] = {**data["prepare"], "tokenizer": relative(tokenizer)}
        if isinstance(data.get("classes"), str):
            paths["classes"] = relative(data["classes"])
        found["data"] = {**data, **paths}
    if depends := content.get("depends"):
        found["depends"] = {**depends, "files": [*map(relative, depends.get("files", ()))]}
    return found


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of pipeline.yaml, for editors."""
    schema = PipelineConfig.model_json_schema()
    # `metric: accuracy` is short for a mapping, by a validator that the schema does not show.
    schema["properties"]["metric"]["anyOf"].insert(0, {"type": "string"})
    for stage in stages().values():
        matrix.allow_matrix_(schema["$defs"][stage.__name__], stage.__name__)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
