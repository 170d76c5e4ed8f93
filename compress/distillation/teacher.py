"""Teachers: an earlier stage's artifact, a model of another factory, or an ONNX file."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from compress.artifacts.artifact import Artifact  # noqa: TC001 - a dataclass field
from compress.artifacts.eager_model import EagerModel
from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid, StageFailed, Unavailable, first_line
from compress.common.forward import accept_any_batch, flatten_outputs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from compress.common.forward import Predictor

INSTALL = "pip install onnxruntime"


class OnnxFile(Settings):
    """An ONNX file as a teacher, of which only the outputs are used."""

    onnx: str
    """The file, relative to the pipeline file; onnxruntime runs it on the CPU."""

    def resolve_paths(self, folder: Path) -> OnnxFile:
        """Return the same with its path relative to a folder.

        Raises:
            ArtifactInvalid: there is no such file.
        """
        file = (folder / self.onnx).absolute()
        if not file.is_file():
            raise ArtifactInvalid(f"onnx: {file}: no such file")
        return self.model_copy(update={"onnx": str(file)})

    def identity(self) -> dict[str, Any]:
        """Return what its outputs depend on, for cache keys."""
        from compress.common.atomic_files import sha256_of

        return {"onnx": sha256_of(Path(self.onnx))}


class LoadedTeacher(Protocol):
    """A teacher in memory."""

    def __call__(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the first output, then the features of the requested modules."""
        ...


@dataclass(frozen=True)
class Teacher:
    """Path and kind of a teacher; small enough to be sent to another process."""

    path: Path = field(repr=False)
    digest: str
    kind: type[Artifact] | None = field(repr=False)
    """Class of the artifact at the path; None for an ONNX file."""

    @classmethod
    def from_model(cls, model: Artifact | OnnxFile) -> Teacher:
        """Return the reference to an artifact or ONNX file."""
        if isinstance(model, OnnxFile):
            return cls(Path(model.onnx).absolute(), model.identity()["onnx"], None)
        return cls(model.path.absolute(), model.digest, type(model))

    @property
    def module(self) -> torch.nn.Module:
        """The teacher as a module.

        Raises:
            StageFailed: it is not a torch module, and has no features but its outputs.
        """
        if self.kind is None or not issubclass(self.kind, EagerModel):
            kind = "onnx file" if self.kind is None else f"{self.kind.kind} artifact"
            raise StageFailed(
                f"the teacher is an {kind}, whose outputs alone are seen; name a stage before "
                "quantization and export, or leave out losses that name modules"
            )
        return self.kind.from_directory(self.path).load().requires_grad_(False)

    def load(self, device: str, modules: Sequence[str] = ()) -> LoadedTeacher:
        """Load the teacher.

        Args:
            device: torch's name of the device.
            modules: names of the modules whose features it returns after its output.
        """
        import torch

        if self.kind is None or not issubclass(self.kind, EagerModel):
            return self._load_predictor(device)
        from compress.distillation.feature_hooks import FeatureRecorder

        module = self.module.to(device)
        recorder = FeatureRecorder(module, modules)

        @torch.no_grad()
        def run(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            output = flatten_outputs(module(*inputs))[0]
            return (output, *recorder.take())

        return run

    def _load_predictor(self, device: str) -> LoadedTeacher:
        # The predictor is closed with the function that is returned, which holds the stack.
        stack = ExitStack()
        predict = stack.enter_context(self._open_predictor(device))

        def run(
            inputs: tuple[torch.Tensor, ...], _open: ExitStack = stack
        ) -> tuple[torch.Tensor, ...]:
            # Cloned because tensors from inference mode cannot take part in a backward pass.
            return (predict(*inputs)[0].to(device).clone(),)

        return run

    @contextmanager
    def _open_predictor(self, device: str) -> Iterator[Predictor]:
        """Open the teacher as a predictor for any batch size, on torch's number of threads."""
        import torch

        if self.kind is None:
            yield _onnx_predictor(self.path)
            return
        artifact = self.kind.from_directory(self.path)
        with artifact.open(device, torch.get_num_threads()) as predict:
            yield accept_any_batch(predict, artifact.signature)


def _onnx_predictor(file: Path) -> Predictor:
    """Load a user's ONNX file in onnxruntime."""
    import torch

    try:
        import onnxruntime
    except ImportError as error:
        raise Unavailable(f"teacher {file}: needs onnxruntime; {INSTALL}") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    try:
        session = onnxruntime.InferenceSession(str(file), options, ["CPUExecutionProvider"])
    except Exception as error:
        raise ArtifactInvalid(
            f"teacher {file}: onnxruntime cannot load it: {first_line(error)}"
        ) from error
    names = [i.name for i in session.get_inputs()]

    def predict(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if len(inputs) != len(names):
            raise StageFailed(
                f"teacher {file}: takes {len(names)} inputs ({', '.join(names)}), and samples "
                f"have {len(inputs)}"
            )
        feed = {n: x.detach().cpu().numpy() for n, x in zip(names, inputs, strict=True)}
        try:
            return tuple(torch.from_numpy(y) for y in session.run(None, feed))
        except Exception as error:
            raise StageFailed(f"teacher {file}: {first_line(error)}") from error

    return predict
