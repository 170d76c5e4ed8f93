"""Infers what a model is for, from the loss, the metric or its class in a Hugging Face folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.artifacts.hf_folder import read_json
from compress.common.errors import ArtifactInvalid
from compress.core.metrics import metric_class
from compress.core.objectives.losses import loss_kinds
from compress.core.objectives.task import TASKS
from compress.pipelines.config.model_spec import HuggingFaceModel

if TYPE_CHECKING:
    from pathlib import Path

    from compress.core.objectives.task import Task
    from compress.pipelines.config.pipeline import PipelineConfig

OF_HUGGING_FACE = {
    "audio-classification": "classification",
    "feature-extraction": "embedding",
    # Labels of the masked tokens, and -100 elsewhere.
    "fill-mask": "token-classification",
    "image-classification": "classification",
    "image-segmentation": "segmentation",
    "multiple-choice": "classification",
    "object-detection": "detection",
    "text-classification": "classification",
    "text-generation": "causal-lm",
    "token-classification": "token-classification",
    "video-classification": "classification",
}
"""`model.task`, by its name in transformers' pipelines → the task; others have none here."""
OF_CLASSES = {
    "ForAudioClassification": "classification",
    "ForMaskedLM": "token-classification",
    "ForImageClassification": "classification",
    "ForSemanticSegmentation": "segmentation",
    "ForMultipleChoice": "classification",
    "ForObjectDetection": "detection",
    "ForSequenceClassification": "classification",
    "ForCausalLM": "causal-lm",
    "LMHeadModel": "causal-lm",
    "ForTokenClassification": "token-classification",
    "ForVideoClassification": "classification",
}
"""End of the name of a model class of transformers → the task."""
OF_PROBLEMS = {"regression": "regression", "multi_label_classification": "multilabel"}
"""`problem_type` in the config of a classifier of transformers → the task."""


def task_of(pipeline: PipelineConfig) -> tuple[Task | None, str]:
    """Return the file's task, or the one that follows without the data, and what it follows from.

    The reason is empty where the file names the task.
    """
    if pipeline.task is not None:
        return TASKS[pipeline.task], ""
    loss = pipeline.loss if pipeline.loss in loss_kinds() else None
    if loss is not None and loss_kinds()[loss].of_numbers:
        return TASKS["regression"], f"as loss is {loss}"
    metric = pipeline.metric.name if pipeline.metric and loss is None else ""
    if metric_class(metric).of_numbers:
        return TASKS["regression"], f"as metric is {metric}"
    if not isinstance(pipeline.model, HuggingFaceModel):
        return None, ""
    name, reason = _of_folder(pipeline.folder / pipeline.model.huggingface, pipeline.model.task)
    task = TASKS.get(name or "")
    # A loss that the file names says more than a class, which may be used for something else.
    if task is None or (loss is not None and loss not in task.losses):
        return None, ""
    return task, reason


def _of_folder(folder: Path, model_task: str | None) -> tuple[str | None, str]:
    """Return the name of the task of a Hugging Face folder, and what shows it."""
    try:
        config = read_json(folder / "config.json")
        architectures = config.get("architectures") or [""]
        class_name, problem = str(architectures[0]), config.get("problem_type")
    except (ArtifactInvalid, LookupError, TypeError):
        return None, ""  # refused where the folder is read
    name, reason = OF_HUGGING_FACE.get(model_task or ""), f"as model.task is {model_task}"
    if model_task is None:
        ends = (task for end, task in OF_CLASSES.items() if class_name.endswith(end))
        name, reason = next(ends, None), f"as the model is a {class_name}"
    if name == "classification" and problem in OF_PROBLEMS:
        return OF_PROBLEMS[problem], f"as the model's problem_type is {problem}"
    return name, reason
