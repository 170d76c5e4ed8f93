"""The artifact `TensorRTEngine`, and the stage `export_tensorrt` that builds it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.config import Count
from compress.common.forward import Predictor, torch_predictor
from compress.common.requirements import Requirement, pip_install, requirements_of
from compress.export.common.compiled_code import CUDA
from compress.export.common.runtime import Runtime
from compress.export.exporter import ExportedModel, Exporter, source_counts
from compress.export.onnx.stage import OnnxModel

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from compress.artifacts.artifact import Artifact
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.export.tensorrt.runtime import BuildOptions

logger = logging.getLogger(__name__)
INSTALL = f"{pip_install('tensorrt')} on a machine with an NVIDIA GPU, or use export_onnx"
TENSORRT = Requirement(what="tensorrt", install=INSTALL)
RUNTIME = Runtime(
    name="tensorrt",
    title="TensorRT",
    requirements=(TENSORRT, CUDA.model_copy(update={"install": "use export_onnx"})),
    targets=("tensorrt",),
)
TORCH_TENSORRT = Requirement(what="torch_tensorrt", install=INSTALL)
TENSORRT_RTX = Requirement(what="tensorrt_rtx_bindings", install=pip_install("tensorrt-rtx"))


def _ascending(sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    if list(sizes) == sorted(sizes):
        return sizes
    raise ValueError(f"expected [smallest, usual, largest] in this order, found {list(sizes)}")


ComputeCapability = Literal["sm75", "sm80", "sm86", "sm89", "sm120", "sm121"]
Sizes = Annotated[tuple[Count, Count, Count], AfterValidator(_ascending)]
"""The smallest, the usual and the largest size of a named axis."""


class TensorRTEngine(ExportedModel):
    """A TensorRT engine: kernels chosen on one GPU, or portable ones, with the weights.

    It is bound to that model of GPU, or to the compute capabilities that it was built for, and to
    the version of the library, and refused elsewhere.
    """

    kind: ClassVar[str] = "tensorrt"
    payload: ClassVar[str] = "model.engine"
    runtime: ClassVar[Runtime] = RUNTIME
    is_native_code: ClassVar[bool] = True
    needs_facts: ClassVar[tuple[str, ...]] = ("built_for", "sizes")
    memory_elsewhere: ClassVar[str] = (
        "TensorRT takes memory of the GPU by itself, and PyTorch does not count it"
    )

    def runs_on(self, device: str) -> str:
        """Return the CUDA device that is asked for, or `cuda`."""
        return device if device.startswith("cuda") else "cuda"

    @classmethod
    def open_file(
        cls, file: Path, signature: Signature, facts: Mapping[str, Any], device: str, threads: int
    ) -> AbstractContextManager[Predictor]:
        """Load an engine; more samples than the largest batch are answered in parts.

        Raise Unavailable where it was built elsewhere, or TensorRT or the GPU is not here.
        """
        from compress.export.tensorrt.runtime import bindings, load, refuse_other_host

        device = _numbered(device)
        refuse_other_host(facts["built_for"], file, device)
        trt = bindings(portable="compute_capabilities" in facts["built_for"])
        run = load(trt, file, signature, facts["sizes"], device)
        return torch_predictor(run, device, threads)


class ExportTensorRT(Exporter[EagerModel | GraphModel | OnnxModel, TensorRTEngine]):
    """Build a TensorRT engine for the GPU of this host, checked against its source.

    It computes in the source's own types: float16 and bfloat16 after `convert_precision`, int8
    after `quantize_static` with `target: tensorrt`. The fastest on NVIDIA's GPUs, and tied to one
    model of them. With `compute_capabilities` it is built ahead of time, on any machine.

        - {stage: export_tensorrt, sizes: {batch: [1, 8, 32]}, cache: tensorrt_cache}
        - {stage: export_tensorrt, compute_capabilities: [sm86, sm89, sm120]}
    """

    stage: Literal["export_tensorrt"] = "export_tensorrt"
    keeps_outputs: ClassVar[bool] = False
    compute_capabilities: tuple[ComputeCapability, ...] = ()
    """GPUs that TensorRT for RTX builds one engine for, which needs no GPU: sm75 is Turing, sm80
    and sm86 Ampere, sm89 Ada, sm120 and sm121 Blackwell. It is compared with its source where one
    of them is here, and elsewhere built and not run. By default TensorRT builds for this host's."""
    through: Literal["onnx", "torch_tensorrt"] = "onnx"
    """How the model gets there: by an ONNX file and TensorRT's own parser, or by torch-tensorrt's
    converters, which take no int8 graphs."""
    sizes: dict[str, Sizes] = {}
    """Named axis → smallest, usual and largest size, e.g. `{batch: [1, 8, 32]}`, which is what the
    batch gets when left out. Every other named axis must be given, unless `model.axes` says its
    smallest and largest size."""
    workspace_mebibytes: Count | None = None
    """Memory that a kernel may use besides weights and activations; all there is by default."""
    optimization_level: Annotated[int, Field(ge=0, le=5)] | None = None
    """How long to look for fast kernels; TensorRT's own default (3) when left out."""
    tf32: bool = False
    """Whether products of float32 numbers may round them to 10 bits, which is faster."""
    cache: str | None = None
    """Folder, relative to the pipeline file, where TensorRT keeps the timings of kernels and
    torch-tensorrt its engines, so that building again is faster; none when left out."""

    @model_validator(mode="after")
    def _check_portable(self) -> Self:
        if self.compute_capabilities and (self.cache or self.through != "onnx"):
            setting = "cache" if self.cache else "through"
            raise ValueError(
                f"{setting} is for the GPU of this host: TensorRT for RTX reads ONNX and keeps no "
                "timings of kernels; leave it out, or compute_capabilities"
            )
        return self

    def resolve_paths(self, folder: Path, code: Path) -> Self:
        """Return the stage with its cache's path resolved against the pipeline file's folder."""
        if self.cache is None:
            return self
        return self.model_copy(update={"cache": str((folder / self.cache).absolute())})

    def own_settings(self) -> dict[str, Any]:
        """Return the settings that decide the result; the cache's path does not."""
        return {k: v for k, v in super().own_settings().items() if k != "cache"}

    def all_requirements(self) -> tuple[Requirement, ...]:
        """Return TensorRT, torch-tensorrt where it is used, and a CUDA device; or that for RTX."""
        if self.compute_capabilities:
            return (TENSORRT_RTX, *requirements_of(self))
        converter = (TORCH_TENSORRT,) if self.through == "torch_tensorrt" else ()
        return (*converter, *super().all_requirements())

    @classmethod
    def for_baseline(cls, result: Artifact, context: Context) -> Self:
        """Return the stage with the settings of the engine that it is compared with, if it is one.

        Its sizes and GPUs, for example: by default another library builds, and axes lack sizes.
        """
        made = [s for s in result.manifest.lineage if s.stage == cls.model_fields["stage"].default]
        return cls.model_validate(made[-1].settings if made else {})

    def build_options(self) -> BuildOptions:
        """Return the settings of TensorRT's builder."""
        from compress.export.tensorrt.runtime import BuildOptions

        return BuildOptions(**self.model_dump(include={*BuildOptions._fields}))

    @property
    def not_run(self) -> str:
        """Why a portable engine is not called here: the GPUs that it is built for."""
        from compress.export.tensorrt.runtime import not_run_reason

        capabilities = self.compute_capabilities
        return not_run_reason(capabilities) if capabilities else ""

    @property
    def machine_parts(self) -> dict[str, Any]:
        """What the engine is built for, and whether a portable one is compared here."""
        return {"built_for": self.built_for("cuda:0"), "not_run": self.not_run}

    def built_for(self, device: str) -> dict[str, Any]:
        """Return the GPU, driver and TensorRT of this host, or the GPUs of a portable engine."""
        from compress.export.tensorrt import runtime

        if not self.compute_capabilities:
            return runtime.built_for(device)
        version = runtime.bindings(portable=True).__version__
        return {"tensorrt_rtx": version, "compute_capabilities": [*self.compute_capabilities]}

    def device_for(self, context: Context) -> str:
        """Return the context's CUDA device, or the first."""
        return _numbered(context.device)

    def write(
        self, model: EagerModel | GraphModel | OnnxModel, file: Path, context: Context
    ) -> dict[str, Any]:
        """Build an engine."""
        from compress.export.tensorrt import runtime

        sizes = runtime.sizes_of(model.signature, self.sizes)
        device, options = self.device_for(context), self.build_options()
        host = self.built_for(device)
        if self.through == "onnx":
            built = runtime.build_from_onnx(model, sizes, options)
        else:
            built = runtime.build_from_program(model, sizes, options, device)
        file.write_bytes(built.plan)
        return {
            "built_for": host,
            "layers": built.layers,
            "integer_layers": built.integer_layers,
            "sizes": {name: list(three) for name, three in sizes.items()},
            **source_counts(model),
        }

    def compare(
        self,
        model: EagerModel | GraphModel | OnnxModel,
        expected: Predictor,
        exported: Predictor,
        facts: Mapping[str, Any],
        val_batches: Sequence[tuple[torch.Tensor, ...]],
        context: Context,
    ) -> float:
        """Compare at the smallest, usual and largest sizes, and on `val`."""
        from compress.export.parity.sample_parity import noise_of
        from compress.export.tensorrt.runtime import check_engine

        noise = noise_of(model, context)
        return check_engine(model, expected, exported, facts["sizes"], val_batches, noise)

    def log(self, facts: Mapping[str, Any]) -> None:
        """Log the GPU, or the GPUs, and how much is computed in integers."""
        host = facts["built_for"]
        name = host.get("gpu") or ", ".join(host["compute_capabilities"])
        integer = f"; {n} layers in integers" if (n := facts.get("integer_layers")) else ""
        logger.info("%s: built for %s%s", self.title, name, integer)


def _numbered(device: str) -> str:
    """Return a CUDA device by its number, without which torch-tensorrt fails."""
    return device if device.startswith("cuda:") else "cuda:0"
