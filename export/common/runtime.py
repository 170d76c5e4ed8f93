"""What the toolkit knows of a runtime that files are exported for, said once; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from compress.artifacts.artifact import Artifact
    from compress.common.requirements import Requirement

PredictedRuntime: TypeAlias = Literal["onnx", "openvino"]
"""Kinds of files whose latency is predicted from tables of kernels (`compress.export.latency`)."""


@dataclass(frozen=True, kw_only=True)
class Reproducer:
    """How a script that shows a wrong export runs it, with the runtime's own library alone."""

    file: str
    """Name of the exported file."""
    run_lines: tuple[str, ...]
    """Body of a function that returns the outputs as tensors, from ``inputs`` and ``HERE``."""
    library: str = ""
    """Package that must be installed beside torch and numpy."""
    imports: str = ""
    """Its import lines."""


@dataclass(frozen=True, kw_only=True)
class TritonBackend:
    """How NVIDIA Triton, and KServe through it, serve a runtime's files on the CPU."""

    backend: str
    file: str
    """Name that Triton expects of the file; its suffix tells the formats apart."""
    thread_parameters: tuple[str, str]
    """Names of the settings for threads within an operator, and for what is always 1."""
    kserve_format: str
    """KServe's `modelFormat`, by which it finds a serving runtime."""
    platform: str = ""
    """For backends that run several formats."""
    tensor_name: str = "{name}"
    """A tensor's name in Triton, from its `name`, `index` and `role` (INPUT or OUTPUT)."""
    not_batched: str = ""
    """Why Triton must not join requests for such files; empty where it may."""
    warning: str = ""
    """What may differ there from what the gates measured."""
    refuse: Callable[[Artifact, str], None] | None = None
    """Raises StageFailed, with a stage's title, for a model that the backend does not read."""


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """A runtime, as baselines, parity reports, packages and servers need to know it."""

    name: str
    """As in a gate's ``against``."""
    title: str
    """As in tables and messages."""
    requirements: tuple[Requirement, ...] = ()
    """What must be installed to export with default settings, and to open a file."""
    targets: tuple[str, ...] = ()
    """Quantization targets that it has kernels for, the usual one first; empty: any."""
    runs_in: str = ""
    """Another baseline that computes its files: transformers opens `.gguf` files as modules."""
    reproducer: Reproducer | None = None
    """None: no parity report is written."""
    triton: TritonBackend | None = None
    torch_free_package: str = ""
    """Package by which the built-in server runs a file without torch, as in images."""
