"""Teachers: an earlier stage's artifact, a model of another factory, or an ONNX file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from compress.artifacts.artifact import Artifact  # noqa: TC001 - a dataclass field
from compress.artifacts.eager_model import EagerModel
from compress.common.atomic_files import sha256_of
from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid, StageFailed, first_line
from compress.common.foreign.native_runtimes import onnx_runtime
from compress.common.forward import (
    Predictor,
    accept_any_batch,
    flatten_outputs,
    plain_attention,
)
from compress.common.lazy_modules import torch


class OnnxFile(Settings):
    """An ONNX file as a teacher, of which only the outputs are used."""

    onnx: str
    """The file, relative to the pipeline file; onnxruntime runs it on the CPU."""

    def resolve_paths(self, folder: Path, code: Path) -> OnnxFile:
        """Return the same with its path relative to a folder; the file must exist."""
        file = (folder / self.onnx).absolute()
        if not file.is_file():
            raise ArtifactInvalid(f"onnx: {file}: no such file")
        return self.model_copy(update={"onnx": str(file)})

    def identity(self) -> dict[str, Any]:
        """Return what its outputs depend on, for cache keys."""
        return {"onnx": sha256_of(Path(self.onnx))}


LoadedTeacher: TypeAlias = "Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]"
"""The inputs → the first output, then the features of the requested modules."""


class FeatureRecorder:
    """Forward hooks that keep the outputs of named modules in the last forward pass."""

    def __init__(self, module: torch.nn.Module, names: Sequence[str]) -> None:
        self.names = tuple(dict.fromkeys(names))
        self.features: dict[str, torch.Tensor] = {}
        for name in self.names:
            module.get_submodule(name).register_forward_hook(partial(self._record, name))

    def take(self) -> list[torch.Tensor]:
        """Return and clear the recorded features, in the order of the names."""
        # Cleared, or activations and the graph behind them would live until the next call.
        features, self.features = self.features, {}
        unused = next((name for name in self.names if name not in features), None)
        if unused is not None:
            raise StageFailed(f"module {unused!r} takes no part in the model's forward pass")
        return [features[name] for name in self.names]

    def with_output(self, output: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return and clear the features by name, with the model's output under ""."""
        return dict(zip(self.names, self.take(), strict=True)) | {"": output}

    def _record(self, name: str, module: torch.nn.Module, inputs: object, output: Any) -> None:
        self.features[name] = flatten_outputs(output)[0]


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
        """The teacher as a module, which only a teacher of torch is."""
        if self.kind is None or not issubclass(self.kind, EagerModel):
            kind = "onnx file" if self.kind is None else f"{self.kind.kind} artifact"
            raise StageFailed(
                f"the teacher is an {kind}, whose outputs alone are seen; name a stage before "
                "quantization and export, or leave out losses that name modules"
            )
        return self.kind.from_directory(self.path).load().requires_grad_(False)

    def load(self, device: str, modules: Sequence[str] = ()) -> LoadedTeacher:
        """Load the teacher; it returns its output and then the features of the named modules."""
        if self.kind is not None and issubclass(self.kind, EagerModel):
            module = self.module.to(device)
            recorder = FeatureRecorder(module, modules)

            @torch.no_grad()
            @plain_attention()
            def run_module(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
                output = flatten_outputs(module(*inputs))[0]
                return (output, *recorder.take())

            return run_module

        # The predictor is closed with the function that is returned, which holds the stack.
        stack = ExitStack()
        if self.kind is None:
            predict = _onnx_predictor(self.path)
        else:
            artifact = self.kind.from_directory(self.path)
            opened = artifact.open(device, torch.get_num_threads())
            predict = accept_any_batch(stack.enter_context(opened), artifact.signature)

        def run_predictor(
            inputs: tuple[torch.Tensor, ...], _open: ExitStack = stack
        ) -> tuple[torch.Tensor, ...]:
            # Cloned because tensors from inference mode cannot take part in a backward pass.
            return (predict(*inputs)[0].to(device).clone(),)

        return run_predictor


def _onnx_predictor(file: Path) -> Predictor:
    onnxruntime = onnx_runtime()
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
