"""Loads the data and imports the model that a pipeline file names.

Importing torch and calling the user's factories takes longer than all else in a run whose results
are cached, and in a second `compress check`. So what was found out about model and data is kept
where nothing but what is recorded can have decided it: settings, files, environment variables and
packages, which are compared with what they are now. :func:`is_self_contained` says of which data
that holds; others are read again. The files of data without code are compared by size and times.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
import tempfile
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.artifacts import hf_folder
from compress.checkpoint.loading import checkpoint_digest
from compress.common.atomic_files import user_cache_folder
from compress.common.config import Settings
from compress.common.dependency_recorder import Recording, recording
from compress.common.errors import CompressError, PipelineInvalid, located
from compress.common.factories import forget_modules, local_sources, sources_digest
from compress.common.forward import positional_parameters
from compress.common.sealed_json import canonical_json, read_state, write_state
from compress.common.signature import AxisBounds, Signature, TensorSpec
from compress.core.context import Context
from compress.core.objectives.task import TASKS
from compress.core.progress import Progress, silent
from compress.export.imported.exported_files import digest_of, signature_of
from compress.pipelines.config.data_spec import FileData
from compress.pipelines.config.model_spec import (
    SOURCE,
    HuggingFaceModel,
    ModelFile,
    TimmModel,
)
from compress.pipelines.planning.loss_and_metric import fitting_loss, infer_loss_and_metric
from compress.pipelines.planning.planner import build_plan, task_of
from compress.pipelines.runner.source_model import carried_files, import_source, recipe_of
from compress.pipelines.store.entry import StoredValue, Surroundings
from compress.pipelines.system.machine_info import machine, version_of, versions
from compress.pipelines.system.temp_files import temporary_files
from compress.serve.torchserve.stage import PackageTorchServe

if TYPE_CHECKING:
    from compress.data.fingerprint import Contents
    from compress.data.splits import Splits
    from compress.pipelines.config.pipeline import PipelineConfig
    from compress.pipelines.data.samples import Files
    from compress.pipelines.planning.plan import Plan

LOADER = "compress.pipelines.data.samples:load_files"  # the data factory of files
INPUTS_FILE = "inputs.json"  # in a store: what the last run found out about model and data
REPEATABLE_MODULES = frozenset(
    (
        *("__future__", "abc", "collections", "contextlib", "csv", "dataclasses", "enum"),
        *("functools", "gzip", "io", "itertools", "json", "math", "numpy", "operator", "os"),
        *("pathlib", "pickle", "re", "scipy", "sklearn", "statistics", "string", "struct"),
        *("torch", "types", "typing", "zipfile"),
    )
)
"""Modules that the user's data code may import: they read by Python's `open`, which is recorded.

Others may read in native code, ask the clock or the network; `random` draws anew in each process.
"""
UNREPEATABLE_CODE = re.compile(
    rb"\brandom\.(?!(default_rng|RandomState|Generator)\(\s*\w)|numpy\.random|urandom"
    rb"|environ\[[^]]*\]\s*=|environ\.(pop|setdefault|update)|putenv|chdir"
)
"""Code that may draw from a generator seeded anew in each process, or changes what others see."""
HASH_ORDERED = frozenset(("frozenset", "hash", "id", "set"))
"""Builtins that may answer otherwise in each process: Python salts the hashes of strings."""
MOST_BYTES = 2**28
"""Of data that are remembered: they are made twice at a time in memory, to compare both."""
MOST_CHECKS = 64  # pipeline files of which the outcome of `compress check` is kept
VOLATILE_VARIABLES = frozenset(("COLUMNS", "LINES", "OLDPWD", "PWD", "SHLVL", "TERM", "_"))
"""Of the terminal and the shell; libraries may read any other variable, which nothing records."""


def resolve_inputs(pipeline: PipelineConfig) -> tuple[PipelineConfig, Splits | None, str]:
    """Load the data; return the pipeline with its inputs, the data, a line on what is inferred."""
    from compress.data.infer_signature import (
        described,
        fix_unnamed_axes,
        inputs_of,
        with_named_length,
        with_values_seen,
    )

    data = load_data(pipeline)
    spec, inputs, origin = pipeline.model, pipeline.model.inputs, "the samples of the data"
    with located(f"{pipeline.place('model')}: "):
        if inputs is None and isinstance(spec, ModelFile):
            file = pipeline.folder / spec.file
            if signature := signature_of(spec.kind, file):
                inputs, origin = signature.inputs, file.name
                spec = spec.model_copy(update={"axes": spec.axes or signature.axes})
                if data is not None and pipeline.source_kind == "eager" and spec.kind == "onnx":
                    own = [tensor.name for tensor in inputs]
                    inputs = fix_unnamed_axes(inputs, inputs_of(data, lambda: own))
        if inputs is None and data is None and isinstance(spec, HuggingFaceModel | TimmModel):
            (inputs, axes), origin = _declared_inputs(pipeline, spec), "the model's configuration"
            spec = spec.model_copy(update={"axes": spec.axes or axes})
        if not (is_known := inputs is not None):
            if data is None:
                raise PipelineInvalid(
                    "inputs are not declared, and there is no `data:` whose samples show them"
                )
            inputs = inputs_of(data, lambda: _parameters(pipeline))
            task, _ = task_of(pipeline)
            if task is not None and task.next_token:
                # Samples of one length are cut from a text; the model reads any.
                inputs = with_named_length(inputs)
                if isinstance(spec, HuggingFaceModel) and not spec.axes:
                    spec = spec.model_copy(update={"axes": _declared_inputs(pipeline, spec)[1]})
    if data is not None:
        if is_known:
            with located(f"{pipeline.place('model', 'inputs')}: "):
                inputs = with_values_seen(inputs, data)
        names, dtypes = zip(*((spec.name, spec.dtype) for spec in inputs), strict=True)
        source = data.source and replace(data.source, input_names=names, input_dtypes=dtypes)
        data = replace(data, input_names=names, input_dtypes=dtypes, source=source)
    is_given = pipeline.model.inputs is not None
    inferred = "" if is_given else f"model.inputs, from {origin}: {described(inputs)}"
    model = spec.model_copy(update={"inputs": inputs})
    pipeline = pipeline.model_copy(update={"model": model})
    # Requests, images or texts, must become the model's inputs.
    for index, stage in enumerate(pipeline.stages):
        lacks = any(need.missing() for need in stage.all_requirements() if not need.program)
        if lacks or not isinstance(stage, PackageTorchServe):
            continue  # the planner refuses a stage that lacks a library
        with located(f"{pipeline.place('stages', index)} ({stage.title}): ", PipelineInvalid):
            package = stage.resolve_paths(pipeline.folder, pipeline.code_folder)
            package.check_inputs(Signature(inputs=inputs))
    return pipeline, data, inferred


def _parameters(pipeline: PipelineConfig) -> Sequence[str]:
    spec = pipeline.model
    if isinstance(spec, ModelFile):
        from compress.export.torchscript.file_io import load

        arguments = load(pipeline.folder / spec.file).forward.schema.arguments
        return [argument.name for argument in arguments[1:]]  # without self
    if not isinstance(spec, HuggingFaceModel):
        return positional_parameters(recipe_of(spec).build(pipeline.code_folder))
    folder = pipeline.folder / spec.huggingface
    return positional_parameters(hf_folder.read_architecture(folder, spec.task, spec.labels))


def _declared_inputs(
    pipeline: PipelineConfig, spec: HuggingFaceModel | TimmModel
) -> tuple[tuple[TensorSpec, ...], dict[str, AxisBounds]]:
    """Return the inputs that a library's model declares, and bounds of their axes."""
    import torch

    from compress.artifacts.importing import inputs_of_timm, inputs_of_transformer

    if isinstance(spec, HuggingFaceModel):
        folder = pipeline.folder / spec.huggingface
        module = hf_folder.read_architecture(folder, spec.task, spec.labels)
        return inputs_of_transformer(module, folder)
    with torch.device("meta"):
        return inputs_of_timm(recipe_of(spec).build())


def load_data(pipeline: PipelineConfig) -> Splits | None:
    """Call the data factory or read the data's files, or return None without a data section."""
    spec = pipeline.data
    if spec is None:
        return None
    from compress.data.splits import DataReference

    loading = spec.loader.resolve_paths(pipeline.folder)
    key = spec.key if isinstance(spec, FileData) else "factory"
    try:
        if isinstance(spec, FileData):
            files = _files_of(pipeline, spec)
            call: tuple[str, dict[str, Any]] = (LOADER, {"files": files})
            pads = {**files.preparation.pad_values, **loading.pad_values}
            loading = loading.model_copy(update={"pad_values": pads})
        else:
            call = (spec.factory, dict(spec.arguments))
        reference = DataReference(
            *(*call, pipeline.code_folder, spec.batch_size, loading),
            input_names=tuple(tensor.name for tensor in pipeline.model.inputs or ()),
            input_dtypes=tuple(tensor.dtype for tensor in pipeline.model.inputs or ()),
            name="" if key == "factory" else f"data.{key}",
        )
        return reference.load()
    except PipelineInvalid as error:
        message = str(error)
        for prefix in (f"data.{key}: ", f"data.factory {getattr(spec, 'factory', '')!r}: "):
            message = message.removeprefix(prefix)
        raise PipelineInvalid(f"{pipeline.place('data', key)}: {message}") from error


def _files_of(pipeline: PipelineConfig, spec: FileData) -> Files:
    """Return what the data's files are read with, for the inputs that the model declares."""
    from compress.pipelines.data.preparation import find_preparation
    from compress.pipelines.data.samples import Files, with_class_names

    model, inputs = pipeline.model, pipeline.model.inputs
    if inputs is None and isinstance(model, HuggingFaceModel | TimmModel):
        inputs, _ = _declared_inputs(pipeline, model)
    elif inputs is None and isinstance(model, ModelFile):
        signature = signature_of(model.kind, pipeline.folder / model.file)
        inputs = signature.inputs if signature else None
    preparation, carried = find_preparation(pipeline, inputs)
    task, _ = task_of(pipeline)
    predicts_numbers = task is not None and not task.has_labels and bool(task.losses)
    spec, place = with_class_names(spec, pipeline.folder), (pipeline.folder, pipeline.code_folder)
    continues = task is not None and task.next_token
    return Files(spec, preparation, *place, predicts_numbers, carried, continues)


def measuring_context(
    pipeline: PipelineConfig, root: Path, progress: Progress = silent
) -> tuple[Plan, PipelineConfig, Context, str]:
    """Return plan and pipeline completed by the data, a context, a line on what was inferred."""
    plan = build_plan(pipeline)
    pipeline, data, inferred = resolve_inputs(pipeline)
    plan, pipeline = infer_loss_and_metric(plan, pipeline, data)
    context = Context(
        root=root,
        data=data,
        loss=plan.loss,
        metric=plan.metric,
        device=pipeline.device,
        threads=pipeline.threads,
        seed=pipeline.seed,
        progress=progress,
    )
    return plan, pipeline, context, inferred


def check_model(pipeline: PipelineConfig) -> tuple[Signature, str, Splits | None]:
    """Build model and data, storing nothing; return interface, lines on what was inferred, data."""
    from compress.data.fingerprint import SAMPLED_FOR_FINGERPRINT

    plan, pipeline, context, inferred = measuring_context(pipeline, Path())
    data = context.data
    with temporary_files(), tempfile.TemporaryDirectory() as folder:
        source = import_source(pipeline, Path(folder) / SOURCE, data)
        context = context.with_root(Path(folder))
        contents = data.contents(SAMPLED_FOR_FINGERPRINT) if data else None
        loss = fitting_loss(plan, pipeline, source, context, contents)
        lines = [inferred, plan.task_line, loss]
        return source.signature, "\n".join(filter(None, lines)), data


def _carried_digests(pipeline: PipelineConfig, data: Any) -> dict[str, str]:
    if isinstance(data, RememberedSplits):
        return data.facts.carried
    carried = carried_files(pipeline, data)
    return {name: hashlib.sha256(content).hexdigest() for name, content in sorted(carried.items())}


def source_parts(pipeline: PipelineConfig, data: Splits | None = None) -> dict[str, object]:
    """Return what decides the imported model: its settings, and hashes of its code and weights.

    With data of files, hashes of what it carries of their preparation, too.
    """
    spec = pipeline.model
    parts: dict[str, object] = {"stage": SOURCE, "settings": spec.model_dump(mode="json")}
    if carried := _carried_digests(pipeline, data):
        parts["carried"] = carried
    if isinstance(spec, HuggingFaceModel):
        return {
            **parts,
            "library": version_of("transformers"),
            "checkpoint": hf_folder.folder_digest(pipeline.folder / spec.huggingface),
            "trains": pipeline.stages[0].stage == "train",
        }
    if isinstance(spec, ModelFile):
        return {**parts, "checkpoint": digest_of(pipeline.folder / spec.file)}
    factory = recipe_of(spec).factory
    sources = local_sources(factory, pipeline.code_folder)
    library = "timm" if isinstance(spec, TimmModel) else factory.partition(":")[0]
    checkpoint = pipeline.folder / spec.checkpoint if spec.checkpoint else None
    return {
        **parts,
        "code": sources_digest(sources),
        "library": None if sources else version_of(library),
        "checkpoint": checkpoint_digest(checkpoint) if checkpoint else None,
    }


_at_start: dict[str, str] = {}


@contextmanager
def variables_noted() -> Iterator[None]:
    """Take the variables of now for those that the user set: libraries set others when imported."""
    _at_start.update(os.environ)
    try:
        yield
    finally:
        _at_start.clear()


class CheckedModel(Settings):
    """What `compress check` found out about a model and its data, all valid."""

    signature: Signature
    summary: str
    """Lines that name what was inferred."""


class DataFacts(Settings):
    """What a run found out about the data, and what it inferred of them."""

    inputs: tuple[TensorSpec, ...]
    axes: dict[str, AxisBounds]
    inferred: str
    """Line that names which inputs were inferred."""
    targets: str | None
    """Kind of the targets that the loss follows from."""
    task: str | None
    lengths: dict[str, int]
    parts: dict[str, Any]
    """Of :class:`compress.data.fingerprint.Contents`, as `fingerprint`."""
    fingerprint: str
    warnings: tuple[str, ...]
    carried: dict[str, str] = {}
    """SHA-256 of the files that tell how data of files are prepared."""


def key_of_inputs(pipeline: PipelineConfig, conditions: str) -> str | None:
    """Hash what decides model and data besides what their code reads; None where that fails."""
    try:
        source = source_parts(pipeline)
    except (CompressError, OSError):
        return None  # whoever reads the model says what is wrong with it
    return hashlib.sha256((canonical_json(source) + conditions).encode()).hexdigest()


def conditions_of_inputs(pipeline: PipelineConfig, stages: Sequence[str] = ()) -> str:
    """Return what decides model and data besides the model's own files, as JSON.

    To be asked before model and data are loaded, which changes it. Loss and task are inferred for
    the `stages` that a run selects.
    """
    variables = {n: v for n, v in (_at_start or os.environ).items() if n not in VOLATILE_VARIABLES}
    factory, files = getattr(pipeline.data, "factory", None), ""
    data = local_sources(factory, pipeline.code_folder) if factory else ()
    if isinstance(pipeline.data, FileData):
        from compress.pipelines.data.records import state_of_files

        files = state_of_files(pipeline.data, pipeline.folder)
    return canonical_json(
        {
            "settings": pipeline.model_dump(mode="json", by_alias=True),
            "stages": [*stages],
            "code": sorted(data or ()),
            "versions": versions(),
            "machine": machine(),
            "folders": [os.getcwd(), str(pipeline.folder.absolute()), sys.path],  # noqa: PTH109
            "variables": variables,
            "files": files,
        }
    )


def recall(file: Path, key: str | None, surroundings: Surroundings) -> Any:
    """Return what :func:`remember` kept, or None where anything that it depends on has changed."""
    found = read_state(file, key, StoredValue) if key else None
    return None if found is None or surroundings.change(found.depends) else found.value


def remember(
    file: Path, key: str | None, value: Any, recorded: Recording, surroundings: Surroundings
) -> None:
    """Keep an outcome under a key, with what user code read for it."""
    if key is None or recorded.untracked:
        return
    kept = StoredValue(value=value, depends=surroundings.dependencies(recorded))
    with suppress(OSError):  # no home, or a full disk: the next run takes as long as this one
        write_state(file, key, kept.model_dump(mode="json"))


def is_self_contained(data: Splits, contents: Contents) -> bool:
    """Whether only recorded files, variables and packages decide the data of these contents.

    They are read from files without code, or are plain tensors that the user's own code made, from
    files that Python opened, and a second call of newly imported code makes the same ones.
    """
    if data.source is not None and data.source.factory == LOADER:
        return not data.loading.collate_fn and not contents.unrepeatable
    from torch.utils.data import TensorDataset

    from compress.data.fingerprint import in_memory_tensors

    source, recorded, size = data.source, data.recorded, 0
    for dataset in data.datasets.values():
        tensors = in_memory_tensors(dataset)
        if tensors is None or type(dataset).__getitem__ is not TensorDataset.__getitem__:
            return False
        size += sum(tensor.nbytes for tensor in tensors)
    is_elsewhere = recorded.untracked or recorded.written or data.loading.collate_fn
    if source is None or is_elsewhere or size > MOST_BYTES:
        return False
    own = [Path(file) for file in recorded.files if file.endswith(".py")]
    names = {name.partition(".")[0] for name in recorded.modules}
    names -= {file.stem for file in own} | {file.parent.name for file in own}
    if (
        not local_sources(source.factory, source.folder)
        or names - REPEATABLE_MODULES
        or any(_may_vary(file.read_bytes()) for file in own if file.is_file())
    ):
        return False
    try:
        with forget_modules(recorded.files):
            again = source.load().contents()
    except Exception:  # noqa: BLE001 - code that runs once alone: it is run by the next run as well
        return False
    same: bool = again.parts["splits"] == contents.parts["splits"]
    return same


def _may_vary(code: bytes) -> bool:
    """Whether the user's code may make other data in another process."""
    return bool(UNREPEATABLE_CODE.search(code)) or any(
        isinstance(node, ast.Set | ast.SetComp)
        or (isinstance(node, ast.Name) and node.id in HASH_ORDERED)
        for node in ast.walk(ast.parse(code))
    )


@dataclass(frozen=True)
class RememberedContents:
    """The part of :class:`compress.data.fingerprint.Contents` that lookups in the store need."""

    parts: dict[str, Any]
    fingerprint: str
    load: Callable[[], Contents]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.load(), name)


class _Datasets(UserDict[str, Any]):
    def __init__(self, splits: RememberedSplits) -> None:
        super().__init__(dict.fromkeys(splits.facts.lengths))
        self.splits = splits

    def __getitem__(self, name: str) -> Any:
        return self.splits.loaded.datasets[name]


@dataclass(frozen=True)
class RememberedSplits:
    """Splits of known names, lengths and hashes; they are loaded when samples are read."""

    facts: DataFacts
    reload: Callable[[], Splits | None]
    file: Path
    """Where the facts come from; it is removed if they prove wrong."""
    stream: None = None
    """Tensors in memory are none."""

    @property
    def datasets(self) -> Mapping[str, Any]:
        """The datasets by name."""
        return _Datasets(self)

    @property
    def calibration_split(self) -> str:
        """Name of the split for calibration."""
        return "calibration" if "calibration" in self.facts.lengths else "train"

    @cached_property
    def loaded(self) -> Splits:
        """The splits; PipelineInvalid where they are not the remembered ones."""
        data = self.reload()
        if data is None or data.contents().fingerprint != self.facts.fingerprint:
            self.file.unlink(missing_ok=True)
            raise PipelineInvalid(
                "data: the samples are others than in the last run, and nothing that is "
                "recorded of its reads has changed; run the same command again, and name what it "
                "reads under `depends:`"
            )
        return data

    def contents(self) -> RememberedContents:
        """Return what the data depend on."""
        parts, fingerprint = self.facts.parts, self.facts.fingerprint
        return RememberedContents(parts, fingerprint, lambda: self.loaded.contents())

    def split(self, name: str) -> Any:
        """Return a dataset, or a range of its length until samples are read."""
        known = "loaded" not in vars(self) and name in self.facts.lengths
        return range(self.facts.lengths[name]) if known else self.loaded.split(name)

    def calibration_digest(self, samples: int, seed: int) -> None:
        """Return None: every sample is hashed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loaded, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.loaded.__reduce__()


@dataclass(frozen=True)
class Inputs:
    """A pipeline with model inputs, its data, and loss and metric that follow from both."""

    pipeline: PipelineConfig
    plan: Plan
    data: Splits | None
    inferred: str
    """Line that names which inputs were inferred."""
    file: Path
    key: str | None
    recorded: Recording | None = None
    """What was read to load them; None where they are remembered."""

    def keep(
        self, contents: Contents, warnings: tuple[str, ...], surroundings: Surroundings
    ) -> None:
        """Let the next run remember them, if only what was recorded decides them."""
        recorded, data, loss = self.recorded, self.data, self.plan.loss
        if recorded is None or data is None or not is_self_contained(data, contents):
            return
        facts = DataFacts(
            inputs=self.pipeline.model.inputs or (),
            axes=self.pipeline.model.axes,
            inferred=self.inferred,
            targets=loss.targets,
            task=loss.task.name if loss.task else None,
            lengths=dict(contents.lengths),
            parts=contents.parts,
            fingerprint=contents.fingerprint,
            warnings=warnings,
            carried=_carried_digests(self.pipeline, data),
        )
        remember(self.file, self.key, facts.model_dump(mode="json"), recorded, surroundings)


def load_inputs(
    pipeline: PipelineConfig, plan: Plan, file: Path, surroundings: Surroundings
) -> Inputs:
    """Return model inputs and data as the last run found them, or load them."""
    key = key_of_inputs(pipeline, conditions_of_inputs(pipeline, plan.names))
    if pipeline.data is not None and (found := recall(file, key, surroundings)):
        facts = DataFacts.model_validate(found)
        model = pipeline.model.model_copy(update={"inputs": facts.inputs, "axes": facts.axes})
        resolved = pipeline.model_copy(update={"model": model})
        data: Any = RememberedSplits(facts, lambda: resolve_inputs(pipeline)[1], file)
        task = TASKS[facts.task] if facts.task else None
        loss = replace(plan.loss, targets=facts.targets, task=task)  # type: ignore[arg-type]
        plan, resolved = infer_loss_and_metric(replace(plan, loss=loss), resolved, data)
        return Inputs(resolved, plan, data, facts.inferred, file, key)
    with recording() as recorded:
        resolved, loaded, inferred = resolve_inputs(pipeline)
        plan, resolved = infer_loss_and_metric(plan, resolved, loaded)
    return Inputs(resolved, plan, loaded, inferred, file, key, recorded)


def checked_model(pipeline: PipelineConfig) -> CheckedModel:
    """Return what the last check of an unchanged file found valid, or check; keep no refusal."""
    name = hashlib.sha256(str(Path(pipeline.file).absolute()).encode()).hexdigest()[:16]
    file = user_cache_folder() / "check" / f"{name}.json"
    surroundings = Surroundings(pipeline.folder, pipeline.code_folder, (), lambda line: None)
    # The key has the weights' hash, and a hostile file may take minutes to hash: only where an
    # earlier check found it valid, or this one has.
    conditions = conditions_of_inputs(pipeline)
    key = key_of_inputs(pipeline, conditions) if file.exists() else None
    if found := recall(file, key, surroundings):
        return CheckedModel.model_validate(found)
    with recording() as recorded:
        signature, summary, data = check_model(pipeline)
    result = CheckedModel(signature=signature, summary=summary)
    if data is None or is_self_contained(data, data.contents()):
        key = key or key_of_inputs(pipeline, conditions)
        remember(file, key, result.model_dump(mode="json"), recorded, surroundings)
        with suppress(OSError):  # another check may have removed the same ones
            by_age = sorted(file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime_ns)
            for old in by_age[:-MOST_CHECKS]:
                old.unlink()
    return result
