"""KServe: an InferenceService manifest beside the model repository that it serves."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from compress.artifacts.artifact import Artifact
from compress.common.config import Count
from compress.common.errors import ArtifactInvalid
from compress.common.forward import opened_model
from compress.core.gates import AnyGate, LabelAgreement, Parity
from compress.core.stage import Stage
from compress.serve.repository.triton import (
    TritonRepository,
    backends,
    inherited_facts,
    kind_of,
    open_predictor,
    refuse_foreign_entries,
    unchecked_ids,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from compress.common.forward import Predictor
    from compress.core.context import Context

logger = logging.getLogger(__name__)

REPOSITORY = "model_repository"
NOT_RUN = (
    "neither KServe nor Triton was run: the gates measured the packaged file with the runtime of "
    "this process"
)


class KServeService(Artifact):
    """``inference_service.yaml``, and the model repository to upload to its `storageUri`.

    ``open`` runs the repository's model file in this process.
    """

    kind: ClassVar[str] = "kserve"
    only_device: ClassVar[str] = "cpu"
    payload: ClassVar[str] = "inference_service.yaml"

    @property
    def payload_bytes(self) -> int:
        """Size in bytes of the manifest and of the repository."""
        return sum(file.bytes for file in self.manifest.files.values())

    def check_files(self, hashed: Iterable[str] = ()) -> None:
        """Check as every artifact's files are, and the entries of Triton's configuration."""
        super().check_files(hashed)
        within = [name.removeprefix(f"{REPOSITORY}/") for name in self.manifest.files]
        within.remove(self.payload)
        refuse_foreign_entries(self.path / REPOSITORY, within, str(self.fact("model_name")))

    @opened_model
    def open(self, device: str = "cpu", threads: int = 1) -> Iterator[Predictor]:
        """Yield a predictor of the packaged file; nothing is deployed."""
        name = self.fact("model_file")
        if name not in self.manifest.files:
            raise ArtifactInvalid(f"{self.path}: {name} is not a file of this artifact")
        self.verify_cached()
        with open_predictor(self, self.path / name, threads) as predict:
            yield predict


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
        facts: dict[str, Any] = {
            "model_name": model.model_name,
            "model_file": f"{REPOSITORY}/{model.payload_name}",
            "parameters": model.parameters(),
            "macs": model.macs(),
            "warnings": [NOT_RUN, *unchecked_ids(model)],
            **inherited_facts(model),
        }
        with KServeService.atomic_write(
            context.root, model.signature, lineage=self.lineage(model), facts=facts
        ) as partial:
            for name in model.manifest.files:
                target = partial / REPOSITORY / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(model.path / name, target)
            text = yaml.safe_dump(self._manifest(model), sort_keys=False)
            (partial / KServeService.payload).write_text(text, encoding="utf-8")
        logger.info("%s: %s", self.title, NOT_RUN)
        return KServeService.from_directory(context.root)

    def _manifest(self, model: TritonRepository) -> dict[str, Any]:
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
