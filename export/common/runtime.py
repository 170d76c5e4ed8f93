"""What the toolkit knows of a runtime: its record, and which graphs it takes; imports no torch."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from pathlib import Path

    from torch.export import ExportedProgram

    from compress.artifacts.artifact import Artifact
    from compress.common.requirements import Requirement
    from compress.common.signature import Signature

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Reproducer:
    """How a script that shows a wrong export runs it, with the runtime's own library alone."""

    file: str
    run_lines: tuple[str, ...]
    """Body of a function that returns the outputs as tensors, from ``inputs`` and ``HERE``."""
    library: str = ""
    """Package that must be installed beside torch and numpy."""
    imports: str = ""


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
    requirements: tuple[Requirement, ...] = ()
    """What must be installed to export with default settings, and to open a file."""
    targets: tuple[str, ...] = ()
    """Quantization targets that it has kernels for, the usual one first; empty: any."""
    refused_formats: Mapping[str, str] = field(default_factory=dict)
    """Format of activations that it has no kernels for → why, and what to do."""
    runs_in: str = ""
    """Another baseline that computes its files: transformers opens `.gguf` files as modules."""
    reproducer: Reproducer | None = None
    """None: no parity report is written."""
    triton: TritonBackend | None = None
    from_onnx: Callable[[Path, Signature], Path] | None = None
    """Returns its file of a model, given the model as an ONNX file alone in its folder. Latencies
    in such a runtime are predicted from onnxruntime's kernels (`compress.export.latency`)."""
    torch_free_package: str = ""
    """Package by which the built-in server runs a file without torch, as in images."""


def kernel_facts(integer: Iterable[str], floats: Iterable[str]) -> dict[str, dict[str, int]]:
    """Return facts of a file: how many kernels of each name compute in integers, and in floats."""
    counts = {"integer_kernels": Counter(integer), "float_kernels": Counter(floats)}
    return {group: dict(sorted(found.items())) for group, found in counts.items()}


RECURRENT = re.compile(r"aten\.(lstm|gru|rnn)(?:_tanh|_relu)?\.input")


def refuse_unrolled_rnn(
    program: ExportedProgram, runtime: str, kernels: Collection[str] = ()
) -> None:
    """Raise StageFailed for a recurrent layer of any length, but those of these `kernels`."""
    for node in program.graph.nodes:
        match = RECURRENT.match(str(node.target))
        if match is None or (layer := match[1].upper()) in kernels:
            continue
        batch_first = bool(node.args[-1])
        if not isinstance(node.args[0].meta["val"].shape[1 if batch_first else 0], int):
            other = "".join(f"an {name}, " for name in kernels)
            article = "a" if layer == "GRU" else "an"
            raise StageFailed(
                f"{runtime} writes out the steps of {article} {layer} one by one, and here their "
                "number is a named axis; declare a number instead of the name in model.inputs, or "
                f"use {other}export_onnx or export_torchscript"
            )


UINT16_OPSET = 21  # the first ONNX operator set whose QuantizeLinear has 16-bit integers
NO_BFLOAT16 = (
    "the model computes in bfloat16, for which onnxruntime has no kernels on the CPU (of Conv, "
    "Mul, LSTM and most others); use convert_precision with dtype: float16, or export_torchscript"
)
NO_UINT16_KERNELS = (
    "AOTInductor's integer kernels take 8 bits, found uint16; quantize with 8 bits, or use "
    "export_onnx"
)

NO_UINT16_IN_OPSET = (
    f"opset {{}} has no 16-bit activations; set opset: {UINT16_OPSET} or more, or leave it out"
)
SIGNED_8_BITS = (
    "XNNPACK's integer kernels take activations of signed 8 bits, found unsigned ones or more "
    "bits; quantize with target: xnnpack, or use export_onnx"
)
UINT8_ONLY = (
    "TorchScript's integer kernels take activations of unsigned 8 bits, found {}; quantize with "
    "target: onnxruntime-cpu and 8 bits, or use export_onnx"
)


def warn_of_other_target(target: object, targets: tuple[str, ...], title: str) -> None:
    """Warn of a graph quantized for none of a runtime's targets: it is right, and may be slow."""
    if targets and target is not None and target not in targets:
        logger.warning(
            "%s: the graph was quantized for %s, whose patterns are not all fused here; quantize "
            "with `target: %s`",
            *(title, target, targets[0]),
        )
