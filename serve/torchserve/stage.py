"""Stage: pack a validated model for TorchServe."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.config import Count
from compress.common.errors import StageFailed
from compress.common.requirements import Requirement
from compress.core.gates import AnyGate, LabelAgreement, Parity
from compress.core.stage import Context, Stage
from export.aotinductor.stage import AotModel
from export.onnx.stage import OnnxModel
from export.torchscript.stage import TorchScriptModel
from serve.packaging.preprocessing import ImageInput, TextInput
from serve.torchserve.artifact import TorchServeArchive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from compress.artifacts.artifact import Artifact
    from compress.common.signature import Signature

Servable = OnnxModel | TorchScriptModel | AotModel | GraphModel | EagerModel


class PackageTorchServe(Stage[Servable, TorchServeArchive]):
    """Pack a model into a `.mar` and hold what TorchServe answers against what was validated.

    An eager model is packed as its traced graph: the author's code does not travel.
    """

    stage: Literal["package_torchserve"] = "package_torchserve"
    model_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")] = "model"
    """Name under which it is served: `/predictions/<model_name>`."""
    workers: Count = 1
    """Processes that answer; workers x threads should not exceed the cores."""
    batch_size: Count = 1
    """Requests that TorchServe may join into one call of the model. Written as 1, with a warning,
    unless rows of `val` have shown that they leave each other's answers alone."""
    max_batch_delay_ms: Count = 10
    """How long a request waits to be joined by others, in milliseconds."""
    queue_size: Count = 100
    """Requests that may wait; those above it are answered 503 at once."""
    response_seconds: Count = 120
    """How long the model may take for one call; the worker of a slower one is ended and another
    started, and those who wait are answered 500."""
    max_rows: Count = 128
    """Samples that one request may hold. Keep rows x output bytes below the server's
    `max_response_size` (6.5 MB by default): a larger response kills the worker."""
    threads: Count = 1
    """CPU threads of each worker's model; the environment variable HANDLER_THREADS overrides it."""
    class_names: tuple[str, ...] = ()
    """Names of the first output's classes: JSON answers then hold the likeliest labels of each row.
    By default those that an ONNX file holds."""
    top_labels: Count = 5
    """How many labels of each row."""
    image: ImageInput | None = None
    """How PNG and JPEG bodies become the input, where the model takes an image."""
    text: TextInput | None = None
    """How texts become the inputs, where the model takes tokens."""
    probe_atol: Annotated[float, Field(ge=0)] = 1e-4
    """Largest difference from the recorded probe with which a worker still becomes ready."""
    gates: tuple[AnyGate, ...] = (LabelAgreement(minimum=1.0), Parity(atol=1e-4))
    """Rules that the served model must satisfy; by default it answers as its input does."""

    records_history: ClassVar[bool] = True
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

    @property
    def machine_parts(self) -> dict[str, Any]:
        """The handler's hash: an archive with another version's handler is not started here."""
        import hashlib

        from serve.torchserve.handler_bundle import handler_text

        return {"handler": hashlib.sha256(handler_text()).hexdigest()}

    def resolve_paths(self, folder: Path, code: Path) -> Self:
        """Return the same stage with the tokenizer's file found."""
        return (
            self.model_copy(update={"text": self.text.resolve_paths(folder)}) if self.text else self
        )

    def own_settings(self) -> dict[str, Any]:
        """Return the settings that decide the result; the tokenizer by its content."""
        return super().own_settings() | ({"text": self.text.identity()} if self.text else {})

    def check_inputs(self, signature: Signature) -> None:
        """Refuse what :meth:`run` would refuse once the model is made.

        Raises:
            StageFailed: `image` or `text` does not fit what the model takes.
        """
        if self.image:
            self.image.packed(signature)
        if self.text:
            self.text.packed(signature)

    def run(self, model: Servable, context: Context) -> TorchServeArchive:
        """Pack the model; the same model, settings and data give the same bytes."""
        from serve.packaging.provenance import PROVENANCE, digest_of
        from serve.packaging.recorded_probe import record_probe
        from serve.torchserve.mar_file import write_mar
        from serve.torchserve.pack import members_of
        from serve.torchserve.process import find_java, find_torchserve

        find_java()
        find_torchserve()
        model.verify()
        facts: dict[str, Any] = {
            "model_name": self.model_name,
            "max_rows": self.max_rows,
            "packaged": {"kind": model.kind, "digest": model.digest},
            "parameters": model.parameters(),
            "macs": model.macs(),
        }
        with (
            servable(model) as served,
            TorchServeArchive.atomic_write(
                context.root, model.signature, lineage=self.lineage(model), facts=facts
            ) as partial,
        ):
            probe = record_probe(served, context, self.max_rows)
            if probe.not_joined and self.batch_size > 1:
                facts["warnings"] = [f"batch_size is 1, not {self.batch_size}: {probe.not_joined}"]
            members = members_of(model, served, self, probe, context.history)
            facts["provenance"] = digest_of(members[PROVENANCE]).sha256
            write_mar(partial / TorchServeArchive.payload, members)
        return TorchServeArchive.from_directory(context.root)


@contextmanager
def servable(model: Servable) -> Iterator[Artifact]:
    """Give what is packed: a model as it is, or the graph of an eager one, traced for as long.

    Raises:
        StageFailed: an eager model cannot be traced, or code was compiled for a GPU.
    """
    built_for: Any = model.manifest.facts.get("built_for")
    if isinstance(model, AotModel) and built_for["device"] != "cpu":
        raise StageFailed(
            f"package_torchserve: the package was compiled for {built_for['device']}, and archives "
            "are served on the CPU; compile it with `device: cpu`"
        )
    if not isinstance(model, EagerModel):
        yield model
        return
    with TemporaryDirectory(prefix="compress-graph-") as folder:
        yield GraphModel.from_eager(model, Path(folder) / "graph")
