"""Stage: pack a validated model for TorchServe."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from compress.core.gates import AnyGate, LabelAgreement, Parity
from compress.core.requirement import Requirement
from compress.core.settings import Count
from compress.core.stage import Context, Stage
from export.onnx import OnnxModel
from export.torchscript import TorchScriptModel
from serve.archive import TorchServeArchive


class PackageTorchServe(Stage[OnnxModel | TorchScriptModel, TorchServeArchive]):
    """Pack a model into a `.mar` and hold what TorchServe answers against what was validated."""

    stage: Literal["package_torchserve"] = "package_torchserve"
    model_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")] = "model"
    """Name under which it is served: `/predictions/<model_name>`."""
    workers: Count = 1
    """Processes that answer; workers x threads should not exceed the cores."""
    batch_size: Count = 1
    """Requests that TorchServe may join into one call of the model. Dynamic quantization takes its
    scales from the whole call, so joined requests then change each other's answers slightly."""
    max_batch_delay_ms: Count = 10
    """How long a request waits to be joined by others, in milliseconds."""
    max_rows: Count = 128
    """Samples that one request may hold. Keep rows x output bytes below the server's
    `max_response_size` (6.5 MB by default): a larger response kills the worker."""
    threads: Count = 1
    """CPU threads of each worker's model; the environment variable HANDLER_THREADS overrides it."""
    probe_atol: Annotated[float, Field(ge=0)] = 1e-4
    """Largest difference from the recorded probe with which a worker still becomes ready."""
    gates: tuple[AnyGate, ...] = (LabelAgreement(minimum=1.0), Parity(atol=1e-4))
    """Rules that the served model must satisfy; by default it answers as its input does."""

    requirements: ClassVar[tuple[Requirement, ...]] = (
        Requirement(
            what="java",
            program=True,
            install="Java 17, e.g. apt-get install openjdk-17-jre-headless",
        ),
        Requirement(what="ts", install="pip install 'compress-pipeline[serve]'"),
    )

    @property
    def uses_data(self) -> bool:
        """The probe's inputs come from `val`, where there is one."""
        return True

    def run(self, model: OnnxModel | TorchScriptModel, context: Context) -> TorchServeArchive:
        """Pack the model; the same model, settings and data give the same bytes."""
        from serve.mar import write_mar
        from serve.pack import members_of, record_probe
        from serve.server import find_java, find_torchserve

        find_java()
        find_torchserve()
        model.verify()
        probe = record_probe(model, context, self.max_rows)
        facts: dict[str, Any] = {
            "model_name": self.model_name,
            "max_rows": self.max_rows,
            "packaged": {"kind": model.kind, "digest": model.digest},
            "parameters": model.parameters(),
            "macs": model.macs(),
        }
        with TorchServeArchive.sealing(
            context.root, model.signature, lineage=self.lineage(model), facts=facts
        ) as partial:
            mar = partial / TorchServeArchive.payload
            write_mar(mar, members_of(model, self, probe))
        return TorchServeArchive.at(context.root)
