"""The stage that quantizes by torch.ao's own, deprecated modes; settings only, no torch."""

from __future__ import annotations

import logging
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from compress.core.eager import EagerModel
from compress.core.native import Backend, Engine, Method, Native, NativeModel
from compress.core.stage import Context, Stage
from compress.quantization.samples import Calibration
from compress.quantization.sealing import check_exclude, need_free_batch, told
from compress.training.settings import Training

if TYPE_CHECKING:
    from torch import nn

    from compress.core.loss import Loss

log = logging.getLogger(__name__)

DEPRECATED = (
    "torch itself calls the FX and eager modes of torch.ao deprecated; quantize_static, "
    "quantize_dynamic and quantize_aware_training are not"
)


class QuantizeNative(Stage[EagerModel, NativeModel]):
    """Compute in torch.ao's own integer layers, by its FX or eager mode; for users of TorchScript.

    What it writes is a module in PyTorch, which `export_torchscript` reads; other exports read what
    `quantize_static`, `quantize_dynamic` and `quantize_aware_training` write.
    """

    stage: Literal["quantize_native"] = "quantize_native"
    backend: Backend = "fx"
    """Who finds what is rounded: `fx` in the graph that torch.fx records, BatchNorm and relu fused;
    `eager` between the QuantStub and DeQuantStub of the model's code, whose `fuse_model` is called
    where it has one."""
    method: Method = "static"
    """`static` ranges, fixed on a sample of the data; `dynamic` ones, taken anew in each call, of
    linear layers, LSTMs and GRUs; `qat`, static ones with a training that rounds."""
    engine: Engine = "x86"
    """Library of kernels that the integers are for; this machine's torch must have it. The usual
    formats of `x86` and `fbgemm` leave one of an activation's 8 bits free, as older processors
    would overflow otherwise."""
    calibration_samples: Annotated[int, Field(ge=16)] = 512
    """Samples on which `static` ranges, and those that `qat` begins with, are observed."""
    finetune: Training | None = None
    """The training of `qat`, in one process, by labels; `epochs` alone is enough, and the learning
    rate is then a tenth of that of `train`."""
    exclude: tuple[str, ...] = ()
    """Names of modules left in float; `*` and `?` stand for any characters."""

    @model_validator(mode="after")
    def _settings_fit_the_method(self) -> QuantizeNative:
        if self.method == "qat" and self.finetune is None:
            raise ValueError("method: qat trains; add `finetune: {epochs: 3}`")
        if self.method != "qat" and self.finetune is not None:
            raise ValueError(f"finetune is for method: qat, found method: {self.method}")
        if self.method == "dynamic" and "calibration_samples" in self.model_fields_set:
            raise ValueError(
                "calibration_samples is for ranges that are fixed beforehand, found method: "
                "dynamic; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _one_process_trains(self) -> QuantizeNative:
        training = self.finetune
        found = training and {
            "several processes": not training.parallel.alone,
            f"compile: {training.compile}": training.compile != "none",
            "activation_checkpointing": training.activation_checkpointing != "none",
        }
        for name, cannot in (found or {}).items():
            if cannot:
                raise ValueError(
                    f"method: qat trains in one process, found finetune with {name}; "
                    "quantize_aware_training takes more"
                )
        return self

    @property
    def needs_data(self) -> bool:
        """Whether ranges are fixed beforehand."""
        return self.method != "dynamic"

    @property
    def uses_data(self) -> bool:
        """Always: the result is compared on `val`."""
        return True

    @property
    def uses_loss(self) -> bool:
        """Whether the model is trained while it rounds."""
        return self.finetune is not None

    def check_loss(self, loss: Loss) -> None:
        """Refuse settings that do not go with the task's loss."""
        if self.finetune is not None:
            self.finetune.check_targets_loss(loss)

    @property
    def activation_formats(self) -> frozenset[str]:
        """Unsigned integers of 8 bits."""
        return frozenset({"uint8"})

    def run(self, model: EagerModel, context: Context) -> NativeModel:
        """Observe, train where that is asked for, convert, and seal the module.

        Raises:
            PipelineInvalid: `exclude` names nothing.
            StageFailed: torch.ao cannot read or convert the model, or would change what it
                computes.
            Unavailable: torch lacks the engine.
        """
        from compress.quantization.native import float_modules, quantized_operators
        from compress.quantization.native_comparison import compare_native

        native = self._native(model.load())
        module, facts = self._quantized(model, native, context)
        fidelity = compare_native(model, module, native, context)
        facts = {"float_modules": float_modules(model, module), "engine": self.engine, **facts}
        facts = told(self.title, quantized_operators(module), facts, fidelity)
        log.info("%s: %s", self.title, DEPRECATED)
        facts["warnings"] = [DEPRECATED, *facts.get("warnings", ())]
        lineage = self.lineage(model)
        return NativeModel.create(context.root, model, module, native, lineage=lineage, facts=facts)

    def _native(self, module: nn.Module) -> Native:
        """Return what is replayed when the result is loaded."""
        check_exclude(self.exclude, module)
        excluded = [
            name
            for name, _ in module.named_modules()
            if name and any(fnmatchcase(name, pattern) for pattern in self.exclude)
        ]
        floats = [
            name
            for name, _ in module.named_modules()
            if any(name == other or name.startswith(f"{other}.") for other in excluded)
        ]
        return Native(
            backend=self.backend, method=self.method, engine=self.engine, floats=tuple(floats)
        )

    def _quantized(
        self, model: EagerModel, native: Native, context: Context
    ) -> tuple[nn.Module, dict[str, Any]]:
        """Return the module in integer layers, and what was found out."""
        from compress.quantization.native import quantize_dynamic, quantize_static

        if self.method == "dynamic":
            return quantize_dynamic(model, native), {}

        def report(seen: int) -> None:
            context.progress("calibrate", seen, self.calibration_samples)

        calibration = Calibration.of(self.calibration_samples, model.signature, context)
        if self.finetune is None:
            return quantize_static(model, native, calibration, report), {}
        from compress.quantization.native_training import train

        need_free_batch(model.signature, self.title)
        return train(model, native, calibration, report, self.finetune, context, self.title)
