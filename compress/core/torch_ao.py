"""torch.ao's FX and eager modes: a module with observers, then with integer layers.

Both are deprecated by torch, and say so at every call; whoever quantizes says it once. What they
make of a module follows from its architecture and the settings alone, so that an artifact is loaded
by doing it again without calibration, and putting the stored integers in.
"""

from __future__ import annotations

import inspect
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.ao import quantization
from torch.ao.quantization import quantize_fx
from torch.ao.quantization.fx.tracer import QuantizationTracer
from torch.ao.quantization.observer import MovingAverageMinMaxObserver

from compress.core.difference import identical
from compress.core.eager import run_in_eval
from compress.core.errors import StageFailed, Unavailable, first_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from compress.core.artifact import Predictor
    from compress.core.native import Native
    from compress.core.signature import Signature

ao: Any = quantization
"""torch leaves most of it without types."""
convert_fx: Any = quantize_fx.convert_fx
DYNAMIC = (nn.Linear, nn.LSTM, nn.GRU)
"""Layers that torch has kernels with run-time ranges for."""
UNBOUND = ("onednn", "qnnpack")
"""Engines whose sums do not overflow when an activation has all of its 8 bits."""
PLAIN = 0
"""The version of torch's settings for training that rounds as conversion does; the usual one (1)
trains weights with other scales than it converts with."""


class HalfRangeObserver(MovingAverageMinMaxObserver):
    """Gives what it has seen half of the integers, and lets larger numbers have the others.

    So do the kernels of `x86` and `fbgemm`, for which torch's own settings take 7 of 8 bits: what
    is larger they keep, where torch's rounding in training (2.13) clips it, and trains another
    model.
    """

    def _calculate_qparams(
        self, min_val: torch.Tensor, max_val: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = min_val.clamp(max=0), max_val.clamp(min=0)
        found: tuple[torch.Tensor, torch.Tensor] = super()._calculate_qparams(
            low, low + 2 * (high - low)
        )
        return found


@contextmanager
def computing_with(engine: str) -> Iterator[None]:
    """Let torch's integer layers be packed for an engine, and computed by it, for a block.

    Raises:
        Unavailable: this torch lacks it.
    """
    known = torch.backends.quantized.supported_engines
    if engine not in known:
        raise Unavailable(
            f"torch {torch.__version__} has no engine {engine!r} for integers here; it has "
            f"{', '.join(known)}"
        )
    previous = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        yield
    finally:
        torch.backends.quantized.engine = previous


def by_engine(predict: Predictor, engine: str) -> Predictor:
    """Return a predictor that has an engine compute each call: two open models may want two."""

    def predict_by_engine(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with computing_with(engine):
            return predict(*inputs)

    return predict_by_engine


@contextmanager
def quiet() -> Iterator[None]:
    """Hide what torch.ao says at every call of its own deprecation, and of its own settings."""
    with warnings.catch_warnings():
        for message in (
            r"torch\.ao\.quantization is deprecated",
            r"\s*Please use quant_min and quant_max to specify the range for observers",
            r"\s*must run observer before calling calculate_qparams",  # loading calibrates nothing
            r"torch\.quantize_per_\w+, .* are deprecated",
            r"To copy construct from a tensor",
        ):
            warnings.filterwarnings("ignore", message=message)
        yield


def prepared(module: nn.Module, native: Native, signature: Signature) -> nn.Module:
    """Return a module with observers where torch.ao is to round; in train mode if it is to train.

    Args:
        module: a float module in eval mode; it is used up.
        native: how it is quantized.
        signature: its interface.

    Raises:
        StageFailed: torch.ao cannot do it; the message says what to do instead.
    """
    with quiet(), computing_with(native.engine):
        try:
            if native.backend == "eager":
                return _prepared_eager(module, native)
            return _prepared_fx(module, native, signature)
        except StageFailed:
            raise
        except Exception as error:  # whatever a trace of the user's own code raises
            raise StageFailed(
                f"torch.ao's {native.backend} mode cannot read the model: {_told(error)}; use "
                "quantize_static or quantize_dynamic, which take more models"
            ) from error


def converted(module: nn.Module, native: Native) -> nn.Module:
    """Return a prepared module in integer layers.

    Args:
        module: the prepared module; it is used up.
        native: how it is quantized.

    Raises:
        StageFailed: torch.ao cannot do it.
    """
    with quiet(), computing_with(native.engine):
        try:
            if native.backend == "fx":
                found: nn.Module = convert_fx(module.eval())
                return found
            dynamic = ao.get_default_dynamic_quant_module_mappings()
            mapping = dynamic if native.method == "dynamic" else None
            ao.convert(module.eval(), mapping, inplace=True)
            return module
        except Exception as error:  # torch.ao's own, of any kind
            raise StageFailed(
                f"torch.ao's {native.backend} mode cannot convert the model: {_told(error)}; leave "
                "that part in float with `exclude`, or use quantize_static"
            ) from error


def refuse_other_answers(
    module: nn.Module, again: nn.Module, engine: str, signature: Signature
) -> None:
    """Refuse a module that was built anew and does not answer bit for bit alike.

    Raises:
        StageFailed: so it is.
    """
    inputs = signature.example()
    with computing_with(engine), quiet():
        pairs = zip(run_in_eval(module, inputs), run_in_eval(again, inputs), strict=True)
        if not all(identical(a, b) for a, b in pairs):
            raise StageFailed(
                "the quantized model answers otherwise when it is built anew from its recipe and "
                "integers; its factory must build the same layers each time"
            )


def _prepared_fx(module: nn.Module, native: Native, signature: Signature) -> nn.Module:
    mapping = _fx_mapping(native)
    for name in native.floats:
        mapping.set_module_name(name, None)
    example = signature.example()
    if native.method != "qat":
        return quantize_fx.prepare_fx(module, mapping, example)
    # Recorded in eval mode: a dropout of torch.nn.functional would else be on for ever.
    tracer = QuantizationTracer([], [])
    recorded = fx.GraphModule(module, tracer.trace(module))
    return quantize_fx.prepare_qat_fx(recorded.train(), mapping, example)


def _fx_mapping(native: Native) -> Any:
    if native.method == "static":
        return ao.get_default_qconfig_mapping(native.engine)
    if native.method == "qat":
        whole = ao.get_default_qat_qconfig_mapping(native.engine, version=PLAIN)
        return whole.set_global(_training_config(native))
    mapping = ao.QConfigMapping().set_global(None)
    for kind in DYNAMIC:
        mapping.set_object_type(kind, _dynamic_config(kind, native))
    functional = nn.functional
    for fused in (functional.linear, nn.ReLU, functional.relu):  # only of the same settings
        mapping.set_object_type(fused, _dynamic_config(nn.Linear, native))
    return mapping


def _dynamic_config(kind: Any, native: Native) -> Any:
    """Return a layer's weights by channel where its kernels take them."""
    each = kind is nn.Linear and native.engine != "qnnpack"
    return ao.per_channel_dynamic_qconfig if each else ao.default_dynamic_qconfig


def _training_config(native: Native) -> Any:
    """Return how numbers are rounded in training: weights as they are at that moment."""
    observer = MovingAverageMinMaxObserver if native.engine in UNBOUND else HalfRangeObserver
    activation = ao.FakeQuantize.with_args(
        observer=observer, quant_min=0, quant_max=255, averaging_constant=0.1
    )
    each = native.engine != "qnnpack"
    weight = ao.default_per_channel_weight_fake_quant if each else ao.default_weight_fake_quant
    return ao.QConfig(activation=activation, weight=weight.with_args(averaging_constant=1.0))


def _prepared_eager(module: nn.Module, native: Native) -> nn.Module:
    parts = {name: part for name, part in module.named_modules() if name not in native.floats}
    if native.method == "dynamic":
        configs = {
            name: _dynamic_config(type(part), native)
            for name, part in parts.items()
            if type(part) in DYNAMIC
        }
        ao.propagate_qconfig_(module, configs)
        return module
    _refuse_without_stubs(parts.values())
    training = native.method == "qat"
    _fuse_(module, training)
    whole: Any = module
    whole.qconfig = _training_config(native) if training else ao.get_default_qconfig(native.engine)
    for name in native.floats:
        part: Any = module.get_submodule(name)
        part.qconfig = None
    if training:
        ao.prepare_qat(module.train(), inplace=True)
    else:
        ao.prepare(module, inplace=True)
    return module


def _refuse_without_stubs(parts: Collection[nn.Module]) -> None:
    """Refuse a module that does not say where integers begin and end.

    Raises:
        StageFailed: so it is.
    """
    for kind in (ao.QuantStub, ao.DeQuantStub):
        if not any(isinstance(part, kind) for part in parts):
            raise StageFailed(
                f"backend: eager rounds from a QuantStub to a DeQuantStub, and the model has no "
                f"torch.ao.quantization.{kind.__name__}; add it to the model's code, or use "
                "backend: fx, which finds the places itself"
            )


def _fuse_(module: nn.Module, training: bool) -> None:
    """Let the model fuse its own layers, as torchvision's quantizable ones do, in place."""
    fuse: Any = getattr(module, "fuse_model", None)
    if fuse is None:
        return
    if "is_qat" in inspect.signature(fuse).parameters:
        module.train(training)
        fuse(is_qat=training)
    else:
        fuse()


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
