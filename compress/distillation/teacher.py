"""Teachers: a model of an earlier stage, of another factory, or an ONNX file, made to answer."""

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
    """An ONNX file that teaches by its outputs."""

    onnx: str
    """The file, relative to the pipeline file; onnxruntime answers, on the CPU."""

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
        """Return what decides its answers."""
        from compress.common.atomic_files import sha256_of

        return {"onnx": sha256_of(Path(self.onnx))}


class Answering(Protocol):
    """A teacher that has been loaded."""

    def __call__(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the first output, and then what each module gave that was asked for."""
        ...


@dataclass(frozen=True)
class Teacher:
    """Where a teacher is, small enough to be sent to another process."""

    path: Path = field(repr=False)
    digest: str
    kind: type[Artifact] | None = field(repr=False)
    """What lies there; None for an ONNX file."""

    @classmethod
    def of(cls, model: Artifact | OnnxFile) -> Teacher:
        """Return where a model is."""
        if isinstance(model, OnnxFile):
            return cls(Path(model.onnx).absolute(), model.identity()["onnx"], None)
        return cls(model.path.absolute(), model.digest, type(model))

    @property
    def module(self) -> torch.nn.Module:
        """The teacher as a module.

        Raises:
            StageFailed: it is none, so that nothing but its outputs can be seen.
        """
        if self.kind is None or not issubclass(self.kind, EagerModel):
            kind = "onnx file" if self.kind is None else f"{self.kind.kind} artifact"
            raise StageFailed(
                f"the teacher is an {kind}, whose outputs alone are seen; name a stage before "
                "quantization and export, or leave out losses that name modules"
            )
        return self.kind.from_directory(self.path).load().requires_grad_(False)

    def answering(self, device: str, modules: Sequence[str] = ()) -> Answering:
        """Return the loaded teacher, which also tells what modules give."""
        import torch

        if self.kind is None or not issubclass(self.kind, EagerModel):
            return self._by_outputs(device)
        from compress.distillation.feature_hooks import Recorder

        module = self.module.to(device)
        recorder = Recorder(module, modules)

        @torch.no_grad()
        def answer(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            output = flatten_outputs(module(*inputs))[0]
            return (output, *recorder.take())

        return answer

    def _by_outputs(self, device: str) -> Answering:
        # It is open for as long as it is asked: the stack is part of what is returned.
        stack = ExitStack()
        predict = stack.enter_context(self._opened(device))

        def answer(
            inputs: tuple[torch.Tensor, ...], _open: ExitStack = stack
        ) -> tuple[torch.Tensor, ...]:
            # A clone: what inference mode made cannot take part in a backward pass.
            return (predict(*inputs)[0].to(device).clone(),)

        return answer

    @contextmanager
    def _opened(self, device: str) -> Iterator[Predictor]:
        """Give the teacher as a predictor of any number of samples, on the threads there are."""
        import torch

        if self.kind is None:
            yield _session(self.path)
            return
        artifact = self.kind.from_directory(self.path)
        with artifact.open(device, torch.get_num_threads()) as predict:
            yield accept_any_batch(predict, artifact.signature)


def _session(file: Path) -> Predictor:
    """Return a predictor of a user's ONNX file."""
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
