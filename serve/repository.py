"""Triton model repositories, and KServe's InferenceService for them: artifacts and stages."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from compress.artifacts.artifact import Artifact
from compress.artifacts.carried_files import CARRIED_NAMES
from compress.common.config import Count
from compress.common.errors import ArtifactInvalid, StageFailed
from compress.common.forward import Predictor, opened_model
from compress.common.signature import TABLE_ROWS
from compress.core.gates import AnyGate, LabelAgreement, Parity
from compress.core.stage import Stage
from compress.export.exporter import EXPORTERS, source_counts

if TYPE_CHECKING:
    from compress.core.context import Context
    from compress.export.common.runtime import TritonBackend
    from compress.serve.packaging.model_interface import Interface, Tensor

logger = logging.getLogger(__name__)

TRITON_NOT_RUN = (
    "Triton itself was not run: the gates measured the packaged file with the runtime of this "
    "process; config.pbtxt is written for Triton's published schema"
)
AUTO_COMPLETES = (
    "start Triton with --disable-auto-complete-config: otherwise it adds dynamic batching, and "
    "joins requests all the same"
)
REPOSITORY = "model_repository"  # folder of the repository beside the InferenceService
NOT_DEPLOYED = (
    "neither KServe nor Triton was run: the gates measured the packaged file with the runtime of "
    "this process"
)
CONFIG, VERSION = "config.pbtxt", "1"
LABELS = "labels.txt"  # names of the classes, one a line, for Triton's classification extension
PREPARATION = "preprocessing"  # parameter with what becomes of an image or a text, as JSON
BLOCKS = {
    *("input", "output", "reshape", "instance_group", "parameters", "value"),
    *("dynamic_batching", "default_queue_policy"),
}
COUNT, TEXT = r"\d+", r'"(?:[^"\\]|\\.)*"'
VALUES = {
    "name": TEXT,
    "string_value": rf'"(?:{COUNT}|\{{(?:[^"\\]|\\.)*)"',
    "label_filename": f'"{LABELS}"',
    "data_type": r"TYPE_\w+",
    "kind": "KIND_CPU",
    **dict.fromkeys(("dims", "shape"), r"\[[-\d, ]*\]"),
    **dict.fromkeys(("max_batch_size", "count", "max_queue_size"), COUNT),
    "max_queue_delay_microseconds": COUNT,
}
"""Entry of a configuration → the values that are written here, but for those of a backend."""


def backends() -> dict[str, TritonBackend]:
    """Return Triton's backends by the kind of artifact that they run."""
    runtimes = {kind: exporter.runtime for kind, exporter in EXPORTERS.items()}
    return {kind: runtime.triton for kind, runtime in runtimes.items() if runtime.triton}


class EnumName(str):
    """An enumeration's value, which protobuf text format writes without quotes."""


def model_config(
    stage: PackageTriton,
    kind: str,
    interface: Interface,
    *,
    joins: bool,
    forms: Mapping[str, Any] | None = None,
    labelled: bool = False,
) -> str:
    """Write ``config.pbtxt``, with what clients prepare and whether the first output has names.

    If axis 0 of every tensor is the batch, ``max_batch_size`` is set and the dimensions omit that
    axis; otherwise all dimensions are written and requests are not joined.
    """
    batched = interface.rows_stay_first
    backend = backends()[kind]
    per_call, other = backend.thread_parameters
    config: dict[str, Any] = {
        "name": stage.model_name,
        "backend": backend.backend,
        **({"platform": backend.platform} if backend.platform else {}),
        "max_batch_size": stage.max_batch_size if batched else 0,
        "input": _tensors(interface.inputs, backend, "INPUT", batched),
        "output": _tensors(interface.outputs, backend, "OUTPUT", batched),
        "instance_group": [{"kind": EnumName("KIND_CPU"), "count": stage.instances}],
        "parameters": [
            {"key": key, "value": {"string_value": str(count)}}
            for key, count in ((per_call, stage.threads), (other, 1))
        ],
    }
    if labelled:
        config["output"][0]["label_filename"] = LABELS
    if forms:
        prepared = {"key": PREPARATION, "value": {"string_value": json.dumps(forms)}}
        config["parameters"].append(prepared)
    if batched and joins:
        config["dynamic_batching"] = {
            "max_queue_delay_microseconds": round(stage.max_batch_delay_ms * 1000),
            "default_queue_policy": {"max_queue_size": stage.queue_size},
        }
    return "\n".join(_lines(config)) + "\n"


def refuse_foreign_entries(folder: Path, files: Collection[str], model: str) -> None:
    """Raise ArtifactInvalid for a second model, or foreign entries, whose code Triton runs."""
    known = backends().values()
    of_backends = {
        "backend": [one.backend for one in known],
        "platform": [one.platform for one in known if one.platform],
        "key": [PREPARATION, *(key for one in known for key in one.thread_parameters)],
    }
    values = VALUES | {
        entry: f'"(?:{"|".join(map(re.escape, names))})"' for entry, names in of_backends.items()
    }
    config = f"{model}/{CONFIG}"
    beside = {f"{model}/{name}" for name in (CONFIG, LABELS, *CARRIED_NAMES)}
    for name in files:
        if name not in beside and not name.startswith(f"{model}/{VERSION}/"):
            raise ArtifactInvalid(f"{folder}: {name}: is not of model {model}, and Triton reads it")
    if config not in files:
        raise ArtifactInvalid(f"{folder}: {config} is missing")
    for number, line in enumerate((folder / config).read_text("utf-8").split("\n"), start=1):
        if line.startswith("# "):
            continue
        entry, _, value = line.strip().partition(": ")
        is_block = entry in ("", "}") or (not value and entry.removesuffix(" {") in BLOCKS)
        if not is_block and not re.fullmatch(values.get(entry, "(?!)"), value):
            raise ArtifactInvalid(
                f"{folder / config}:{number}: {line.strip()[:80]!r}: unknown entry, which may name "
                "code that Triton loads"
            )


def _tensors(
    tensors: tuple[Tensor, ...], backend: TritonBackend, role: str, batched: bool
) -> list[dict[str, Any]]:
    from compress.serve.worker.wire import DATATYPES  # which imports NumPy

    entries = []
    for i, tensor in enumerate(tensors):
        name, dtype = backend.tensor_name.format(name=tensor.name, role=role, index=i), tensor.dtype
        if dtype not in DATATYPES:
            raise StageFailed(f"{tensor.name} is {dtype}, which Triton's requests do not carry")
        dims = [*(tensor.shape[1:] if batched else tensor.shape)]
        entry: dict[str, Any] = {"name": name, "data_type": EnumName(f"TYPE_{DATATYPES[dtype]}")}
        # Triton requires a dimension: for a scalar it passes one element, reshaped to none.
        entry |= {"dims": dims} if dims else {"dims": [1], "reshape": {"shape": []}}
        entries.append(entry)
    return entries


def _lines(message: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield protobuf text: ``key: value``, a block for a message, a list for integers."""
    for key, value in message.items():
        if isinstance(value, list) and all(isinstance(v, int) for v in value):
            yield f"{indent}{key}: [{', '.join(map(str, value))}]"
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield f"{indent}{key} {{"
                yield from _lines(item, f"{indent}  ")
                yield f"{indent}}}"
            else:
                text = item if isinstance(item, EnumName) else json.dumps(item)
                yield f"{indent}{key}: {text}"


class PackagedRepository(Artifact):
    """A model repository in an artifact; ``open`` runs its model file in this process."""

    only_device: ClassVar[str] = "cpu"
    repository: ClassVar[str] = ""
    """Where the repository is in the artifact: nowhere else, or a folder with `/` at its end."""

    @property
    def model_name(self) -> str:
        """Name under which Triton serves the model."""
        return str(self.fact("model_name"))

    @property
    def model_file(self) -> str:
        """The model's file in its version folder."""
        return str(self.fact("model_file"))

    @property
    def payload_bytes(self) -> int:
        """Size in bytes of all files."""
        return sum(file.bytes for file in self.manifest.files.values())

    def check_files(self, hashed: Iterable[str] = ()) -> None:
        """Check as every artifact's files are, and the entries of Triton's configuration."""
        super().check_files(hashed)
        beside = {self.payload} if self.repository else set()
        files = self.manifest.files.keys() - beside
        within = [name.removeprefix(self.repository) for name in sorted(files)]
        refuse_foreign_entries(self.path / self.repository, within, self.model_name)

    @opened_model
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Yield a predictor of the packaged file; nothing is deployed."""
        if self.model_file not in self.manifest.files:
            raise ArtifactInvalid(f"{self.path}: {self.model_file} is not a file of this artifact")
        self.verify_cached()
        file, facts = self.path / self.model_file, self.manifest.facts
        model = EXPORTERS[kind_of(file)].writes()
        for name in model.needs_facts:
            self.fact(name)
        # The configuration says KIND_CPU, whatever this machine has.
        with model.open_file(file, self.signature, facts, "cpu", threads) as predict:
            yield predict


class TritonRepository(PackagedRepository):
    """A model repository: ``<name>/config.pbtxt`` and ``<name>/1/`` with the model.

    Triton ignores the artifact's manifest beside the model's folder, because it is no folder.
    """

    kind: ClassVar[str] = "triton"
    payload: ClassVar[str] = CONFIG
    payload_name = PackagedRepository.model_file


class PackageTriton(Stage[Artifact, TritonRepository]):
    """Lay a model out as a repository of Triton's, with a configuration from its signature.

    For files whose runtime has a backend there: Triton joins requests, and runs several copies.

        - {stage: package_triton, model_name: resnet, max_batch_delay_ms: 2, instances: 2}
    """

    stage: Literal["package_triton"] = "package_triton"
    model_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")] = "model"
    """Name under which it is served, and of its folder: `/v2/models/<model_name>/infer`."""
    max_batch_size: Count = 128
    """Rows that Triton gives the model at once, where axis 0 of every tensor counts them; other
    models are served with all their dimensions written and no batching."""
    dynamic_batching: bool = True
    """Whether Triton may join waiting requests; left out, with a warning, unless rows of `val` have
    shown that they do not change each other's answers."""
    max_batch_delay_ms: Annotated[float, Field(ge=0)] = 0.0
    """How long a request waits to be joined by others, in milliseconds."""
    queue_size: Count = 128
    """Requests that may wait; Triton refuses those above."""
    instances: Count = 1
    """Copies of the model that answer at once; instances x threads should not exceed the cores."""
    threads: Count = 1
    """CPU threads of each copy."""
    gates: tuple[AnyGate, ...] = (LabelAgreement(minimum=1.0), Parity(atol=1e-4))
    """Rules that the packaged file must satisfy; by default it answers as its input does."""

    @property
    def uses_data(self) -> bool:
        """Whether requests may be batched is measured on rows of `val`."""
        return True

    @classmethod
    def reads(cls) -> Any:
        """Return the artifacts whose runtime says how Triton runs them."""
        return reduce(or_, (EXPORTERS[kind].writes() for kind in backends()))

    def run(self, model: Artifact, context: Context) -> TritonRepository:
        """Copy the model and write its configuration, reproducibly."""
        from compress.profiling.batch_dependence import numpy_call
        from compress.serve.packaging.model_interface import (
            infer_interface,
            refuse_code_for_gpu,
            why_not_joined,
        )
        from compress.serve.packaging.request_forms import form_settings, forms_of

        backend = backends()[model.kind]
        refuse_code_for_gpu(model, self.title, "the repository's instances are on the CPU")
        model.verify()
        with model.open("cpu", context.threads) as predict:
            interface = infer_interface(numpy_call(predict, model.signature), model.signature)
        if backend.refuse:
            backend.refuse(model, self.title)
        not_joined = backend.not_batched
        if not_joined:  # all dimensions are written, and Triton passes them on as they are
            interface = replace(interface, rows_stay_first=False)
        else:
            not_joined = why_not_joined(interface.rows_stay_first, context.batch_dependence(model))
        warnings = [TRITON_NOT_RUN, *unchecked_ids(model)]
        if backend.warning:
            warnings.append(backend.warning)
        if not_joined and self.dynamic_batching:
            warnings.append(f"requests are not joined: {not_joined}")
        joins = self.dynamic_batching and not not_joined
        if interface.rows_stay_first and not joins:
            warnings.append(AUTO_COMPLETES)
        payload = f"{self.model_name}/{VERSION}/{backend.file}"
        batched = interface.rows_stay_first
        facts = packaged_facts(model, self.model_name, payload, warnings, batched=batched)
        carried, names = model.carried_files(), model.class_names
        prepared = form_settings(forms_of(model), model.signature)
        scores = interface.outputs[0].shape
        labelled = bool(names) and len(scores) == 2 and scores[1] == len(names)
        with TritonRepository.atomic_write(
            context.root, model.signature, lineage=self.lineage(model), facts=facts
        ) as partial:
            folder = partial / self.model_name / VERSION
            model.copy_files(model.model_files, folder)
            # External weights keep their names.
            (folder / model.payload).rename(folder / backend.file)
            if labelled:
                carried[LABELS] = "".join(f"{' '.join(name.split())}\n" for name in names).encode()
            for name, content in carried.items():
                (folder.parent / name).write_bytes(content)
            text = model_config(
                *(self, model.kind, interface), joins=joins, forms=prepared, labelled=labelled
            )
            lines = unchecked_ids(model) + [
                f"{spec.name} may hold {' and '.join(spec.not_finite)}, as samples of the data do"
                for spec in model.signature.inputs
                if spec.not_finite
            ]
            comments = "".join(f"# {line}\n" for line in lines)
            (partial / self.model_name / CONFIG).write_text(comments + text, encoding="utf-8")
        logger.info("%s: %s", self.title, TRITON_NOT_RUN)
        return TritonRepository.from_directory(context.root)


def kind_of(file: Path) -> str:
    """Return the kind of artifact that a repository's model file is, by its suffix."""
    for kind, backend in backends().items():
        if PurePath(backend.file).suffix == file.suffix:
            return kind
    raise ArtifactInvalid(f"{file}: no backend of Triton's that is known here reads such files")


def packaged_facts(
    model: Artifact, name: str, file: str, warnings: Sequence[str], **further: Any
) -> dict[str, Any]:
    """Return facts of a repository: name, file, counts, warnings, and what opening the file needs.

    The latter are the machine that native code was compiled for, and the rows of embedding tables.
    """
    known = model.manifest.facts
    return {
        "model_name": name,
        "model_file": file,
        **further,  # here, as the facts' order is a part of the artifact's digest
        **source_counts(model),
        "warnings": [*warnings],
        **{key: known[key] for key in ("built_for", TABLE_ROWS) if key in known},
    }


def unchecked_ids(model: Artifact) -> list[str]:
    """Return a line for each input of ids, whose range Triton does not know."""
    rows: Any = model.manifest.facts.get(TABLE_ROWS, {})
    return [
        f"{name} must hold ids from 0 to {count - 1}: Triton does not check them, and at others "
        "the runtime answers with another row of the table, or ends"
        for name, count in rows.items()
    ]


class KServeService(PackagedRepository):
    """``inference_service.yaml``, and the model repository to upload to its `storageUri`."""

    kind: ClassVar[str] = "kserve"
    payload: ClassVar[str] = "inference_service.yaml"
    repository: ClassVar[str] = f"{REPOSITORY}/"


class PackageKServe(Stage[TritonRepository, KServeService]):
    """Write the InferenceService that serves a model repository by the Open Inference Protocol.

    After `package_triton`, for a Kubernetes cluster with KServe.

        - {stage: package_kserve, storage_uri: "s3://models/resnet", cpu: "2", max_replicas: 4}
    """

    stage: Literal["package_kserve"] = "package_kserve"
    storage_uri: Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://\S+$")]
    """Where the cluster finds the repository: `s3://bucket/folder`, `gs://…`, `pvc://claim/folder`.
    Copying it there is yours to do."""
    service_name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")] = "model"
    """Name of the service, which becomes a part of its address."""
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")] | None = None
    """Kubernetes namespace; that of the command which applies the manifest, where left out."""
    model_format: Literal["onnx", "pytorch", "triton"] | None = None
    """KServe's name of the format, by which it finds a runtime; that of the file where left out."""
    runtime: Annotated[str, Field(pattern=r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$")] = (
        "kserve-tritonserver"
    )
    """Name of the serving runtime; it must take a model repository."""
    cpu: Annotated[str, Field(pattern=r"^([0-9]+m|[0-9]+(\.[0-9]{1,3})?)$")] = "1"
    """Processors, requested and at most: `2`, or thousandths such as `500m`."""
    memory: Annotated[str, Field(pattern=r"^[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T)?$")] = "2Gi"
    """Memory, requested and at most."""
    min_replicas: Annotated[int, Field(ge=0)] = 1
    """Copies that are kept; 0 lets an idle service sleep, where KServe runs on Knative."""
    max_replicas: Count = 1
    """Copies that may run."""
    gates: tuple[AnyGate, ...] = (LabelAgreement(minimum=1.0), Parity(atol=1e-4))
    """Rules that the packaged file must satisfy; by default it answers as its input does."""

    @model_validator(mode="after")
    def _replicas_are_in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas: {self.min_replicas} is more than max_replicas {self.max_replicas}"
            )
        return self

    def run(self, model: TritonRepository, context: Context) -> KServeService:
        """Copy the repository and write the manifest, reproducibly."""
        import yaml

        model.verify()
        file, warnings = f"{REPOSITORY}/{model.model_file}", [NOT_DEPLOYED, *unchecked_ids(model)]
        facts = packaged_facts(model, model.model_name, file, warnings)
        with KServeService.atomic_write(
            context.root, model.signature, lineage=self.lineage(model), facts=facts
        ) as partial:
            model.copy_files(model.manifest.files, partial / REPOSITORY)
            text = yaml.safe_dump(self.manifest_of(model), sort_keys=False)
            (partial / KServeService.payload).write_text(text, encoding="utf-8")
        logger.info("%s: %s", self.title, NOT_DEPLOYED)
        return KServeService.from_directory(context.root)

    def manifest_of(self, model: TritonRepository) -> dict[str, Any]:
        """Return the InferenceService resource."""
        metadata = {"name": self.service_name}
        if self.namespace:
            metadata["namespace"] = self.namespace
        own_format = backends()[kind_of(model.payload_path)].kserve_format
        resources = {"cpu": self.cpu, "memory": self.memory}
        model_spec = {
            "modelFormat": {"name": self.model_format or own_format},
            "protocolVersion": "v2",
            "runtime": self.runtime,
            "storageUri": self.storage_uri,
            "resources": {"requests": resources, "limits": dict(resources)},
        }
        predictor = {"minReplicas": self.min_replicas, "maxReplicas": self.max_replicas}
        return {
            "apiVersion": "serving.kserve.io/v1beta1",
            "kind": "InferenceService",
            "metadata": metadata,
            "spec": {"predictor": {**predictor, "model": model_spec}},
        }
