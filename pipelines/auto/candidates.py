"""One choice of blocks, widths and formats: as stages, and what was measured of it."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.common.config import Settings
from compress.export.exporter import EXPORTERS
from compress.pipelines.api import Pipeline
from compress.pipelines.config.auto_settings import AutoSettings, Format, Runtime

if TYPE_CHECKING:
    from compress.pipelines.config.pipeline import PipelineConfig
    from compress.pruning.pruning_stage import Finetune

CANDIDATES, STORE = "candidates", ".store"
"""In the results' folder: runs of all candidates, and the stages' results that they share."""
QUANTIZING: dict[Format, dict[str, Any]] = {
    # Smoothed, as transformers lose several points otherwise; networks without linear layers of
    # sequences stay what they are.
    "int8_static": {"stage": "quantize_static", "smooth": "auto"},
    "int8_dynamic": {"stage": "quantize_dynamic"},
    "w7a8_static": {"stage": "quantize_static", "smooth": "auto", "weight_bits": 7},
    "w7a8_dynamic": {"stage": "quantize_dynamic", "weight_bits": 7},
    # In groups of 16, which divide all widths that are multiples of 16.
    "weights_8": {"stage": "quantize_weights", "bits": 8, "group_size": 16},
    "weights_4": {"stage": "quantize_weights", "bits": 4, "group_size": 16},
}


@dataclass(frozen=True)
class Candidate:
    """Blocks, widths, formats and runtime of a model."""

    format: Format
    widths: tuple[tuple[str, int], ...] = ()
    """Group of coupled channels → how many stay; groups that lose none are left out."""
    float_layers: tuple[str, ...] = ()
    """Layers that are left in float, in a quantized format."""
    trained: int = 0
    """Epochs of `space.recovery` that it was trained for after it was cut."""
    runtime: Runtime = "onnx"
    removed_blocks: tuple[str, ...] = ()
    """Names of the blocks that are removed before channels are, in this order."""

    @property
    def is_smaller(self) -> bool:
        """Whether it has fewer channels or blocks than the model before the search."""
        return bool(self.widths or self.removed_blocks)

    @property
    def name(self) -> str:
        """A name for its folder, which tells it from all others."""
        # Without the runtime for ONNX Runtime, which the results of earlier versions are for.
        kind = self.format if self.runtime == "onnx" else f"{self.format}-{self.runtime}"
        if not self.is_smaller and not self.float_layers:
            return f"{kind}-whole"
        chosen: list[Any] = [self.format, self.widths]
        if self.float_layers:
            chosen.append(self.float_layers)
        if self.removed_blocks:
            chosen.append({"removed_blocks": self.removed_blocks})
        digest = hashlib.sha256(json.dumps(chosen).encode()).hexdigest()
        trained = f"-{self.trained}-epochs" if self.trained else ""
        return f"{kind}-{digest[:8]}{trained}"

    def artifacts(self, out: Path) -> Path:
        """Return the folder of its stages' artifacts in the results' folder."""
        return out / CANDIDATES / self.name / "artifacts"

    def settings(self) -> dict[str, Any]:
        """Return what is chosen, as `front.json` and the log have it."""
        return {**asdict(self), "widths": dict(self.widths)}

    @property
    def export(self) -> str:
        """The stage that writes the file to serve, and its name."""
        return EXPORTERS[self.runtime].model_validate({}).title

    def stages(self, base: PipelineConfig, settings: AutoSettings) -> list[dict[str, Any]]:
        """Return the stages that make it after those of `base`, as a pipeline file has them."""
        made: list[dict[str, Any]] = []
        if self.removed_blocks:
            removal = {"stage": "prune_layers", "blocks": list(self.removed_blocks), "refit": True}
            samples = settings.space.widths and settings.space.widths.calibration_samples
            made.append(removal | ({"calibration_samples": samples} if samples else {}))
        space = settings.without_blocks(self.removed_blocks).space
        if self.widths and space.widths is not None:
            own = {"values", "round_to", "importance"}
            kept = space.widths.model_dump(mode="json", exclude_defaults=True, exclude=own)
            chosen = {"widths": dict(self.widths), "importance": space.widths.importance}
            made.append({"stage": "prune_channels", **chosen, **kept})
        if self.trained and space.recovery is not None:
            made += _training_stages(space.recovery, self.trained, last_stage(base))
        if self.format != "float":
            exclude = {"exclude": list(self.float_layers)} if self.float_layers else {}
            made.append({**QUANTIZING[self.format], **exclude})
        return [*made, {"stage": self.export}]

    def pipeline(self, base: PipelineConfig, settings: AutoSettings) -> Pipeline:
        """Return the pipeline that makes it, after the stages of another one."""
        pipeline = Pipeline.model_validate(self.content(base, settings))
        pipeline._source = base._source  # paths are relative to its file
        return pipeline

    def content(self, base: PipelineConfig, settings: AutoSettings) -> dict[str, Any]:
        """Return the content of a pipeline file that makes it, after the stages of another one."""
        content = base.model_dump(mode="json", exclude_unset=True, exclude={"auto", "stages"})
        stages = [s.model_dump(mode="json", exclude_unset=True) for s in base.stages]
        return {**content, "name": base.name, "stages": [*stages, *self.stages(base, settings)]}


class CheckedModel(Settings):
    """A candidate that was built, exported and measured; its choice is as in `Candidate`."""

    name: str
    format: Format
    runtime: Runtime = "onnx"
    widths: dict[str, int]
    float_layers: tuple[str, ...] = ()
    removed_blocks: tuple[str, ...] = ()
    trained: int = 0
    predicted_ms: float | None
    """Median time of a call by the latency model, before it was measured."""
    latency_ms: float
    """Median time of a call, measured in turn with the float ONNX file."""
    latency_upper_ms: float | None = None
    """Upper end of its 95 % confidence interval; None where that is predicted."""
    p95_ms: float | None = None
    """95th percentile of the time of a call; None where that is predicted or not measurable."""
    is_predicted: bool = False
    """Whether `latency_ms` was not measured, but is what tables of another machine predict."""
    bytes: int
    """Of the file to serve."""
    peak_mebibytes: float | None = None
    """Of opening and calling it, without that of the libraries; None where not measurable."""
    loss: float
    """Squared distance of the outputs from the float model's, relative to these."""
    drop: float | None
    """Points of the metric lost on the half of `val` that decides; None where it is not finite."""
    confirmed_drop: float | None = None
    """The same on the other half, of models that were chosen."""
    confirmed_between: tuple[float, float] | None = None
    """95 % confidence interval of `confirmed_drop`; None where too few samples differ."""

    @property
    def loss_order(self) -> tuple[float, float]:
        """A key by which the model that loses least comes first."""
        return (math.inf if self.drop is None else self.drop), self.loss

    @property
    def surely_ms(self) -> float:
        """The latency that a limit is compared with, as the gate of a point's pipeline does."""
        return self.latency_ms if self.latency_upper_ms is None else self.latency_upper_ms

    @property
    def latency(self) -> str:
        """The latency in words."""
        return f"{self.latency_ms:.3g} ms{' as predicted' if self.is_predicted else ''}"

    @property
    def candidate(self) -> Candidate:
        """The choice itself."""
        chosen: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(Candidate)}
        return Candidate(**chosen | {"widths": tuple(sorted(self.widths.items()))})


def after_stages(settings: AutoSettings) -> list[dict[str, Any]]:
    """Return the stages that a point has after its export, as a pipeline file has them."""
    return [stage.model_dump(mode="json", exclude_unset=True) for stage in settings.after]


def rungs(epochs: int) -> list[int]:
    """Return after how many epochs, of all that a model is trained for, some are dropped.

    Each rung of successive halving has three times the epochs of the one before (Jamieson and
    Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization", 2016).
    """
    ends = [1]
    while ends[-1] < epochs:
        ends.append(min(epochs, 3 * ends[-1] + 1))
    return ends


def _training_stages(recovery: Finetune, trained: int, teacher: str) -> list[dict[str, Any]]:
    """Return a stage for each rung, so that a longer training goes on where a shorter one ended."""
    training = recovery.model_dump(mode="json", exclude_unset=True, exclude={"teaching", "epochs"})
    # The best epoch by `val` would flatter a model before it is confirmed on a half of it.
    training = {"keep": "last", **training}
    taught: dict[str, Any] = {"stage": "train"}
    if recovery.teaching is not None:
        settings = recovery.teaching.model_dump(mode="json", exclude_unset=True)
        taught = {"stage": "distill", "teacher": teacher, **settings}
    stages, before = [], 0
    for end in rungs(recovery.epochs):
        if end <= trained:
            name = f"recovery-{end}"
            stages.append({"name": name, **taught, "epochs": end - before, **training})
            before = end
    return stages


def last_stage(base: PipelineConfig) -> str:
    """Return the name of a pipeline's last stage, which makes the model that is searched."""
    return base.stages[-1].title if base.stages else "source"
