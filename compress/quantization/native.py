"""From a float module to torch.ao's own integer layers, with what it would do silently refused."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.ao.quantization import ObserverBase
from torch.ao.quantization.fake_quantize import FakeQuantizeBase

from compress.core.difference import relative_error
from compress.core.eager import flatten_outputs, run_in_eval
from compress.core.errors import StageFailed, first_line
from compress.core.torch_ao import computing_with, converted, prepared, quiet
from compress.quantization.calibrate import refuse_misfit
from compress.quantization.ranges import refuse_unless_finite
from compress.quantization.samples import varied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from compress.core.batch import Batch
    from compress.core.eager import EagerModel
    from compress.core.native import Native
    from compress.core.signature import Signature

INTEGER_LAYERS = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
"""Packages of torch's integer layers, those with run-time ranges included."""
LARGEST_ERROR = 1e-3
"""Of a module with observers, relative to the norm of the float module's answers."""


def quantize_static(
    model: EagerModel,
    native: Native,
    batches: Iterable[Batch],
    report: Callable[[int], None],
) -> nn.Module:
    """Return a model in integer layers whose ranges are fixed.

    Args:
        model: the float model.
        native: how it is quantized.
        batches: calibration inputs; one batch at a time is held in memory.
        report: called with the number of samples seen so far.

    Raises:
        StageFailed: torch.ao cannot quantize the model or would compute something else, or the
            data does not fit the signature, does not vary or is not finite.
    """
    observed = prepared(model.load(), native, model.signature)
    observe_(observed, model, batches, report)
    return integers_of(observed, model, native)


def quantize_dynamic(model: EagerModel, native: Native) -> nn.Module:
    """Return a model in integer layers that take ranges anew in each call.

    Raises:
        StageFailed: torch.ao cannot quantize the model, or would compute something else.
    """
    ready = prepared(model.load(), native, model.signature)
    _refuse_another(ready, model, model.signature.example())
    return integers_of(ready, model, native)


def integers_of(observed: nn.Module, model: EagerModel, native: Native) -> nn.Module:
    """Return a module in integer layers, which is known to answer.

    Args:
        observed: the module with observers; it is used up.
        model: the float model.
        native: how it is quantized.

    Raises:
        StageFailed: torch.ao cannot convert it, nothing was quantized, or it cannot answer.
    """
    module = converted(observed, native)
    if not quantized_operators(module):
        raise StageFailed(
            "no operator could be quantized; expected layers of torch.nn that `exclude` does not "
            "name: linear ones, and convolutions, or with method: dynamic LSTMs and GRUs"
        )
    try:
        with computing_with(native.engine), quiet():
            run_in_eval(module, model.signature.example())
    except (RuntimeError, NotImplementedError) as error:
        mend = (
            "add with torch.ao.nn.quantized.FloatFunctional, keep what stays float outside the "
            "stubs, or use backend: fx"
            if native.backend == "eager"
            else "leave that part in float with `exclude`, or use quantize_static"
        )
        raise StageFailed(
            f"the model cannot compute in torch's integer layers: {first_line(error)}; {mend}"
        ) from error
    return module


def observe_(
    observed: nn.Module,
    model: EagerModel,
    batches: Iterable[Batch],
    report: Callable[[int], None],
) -> None:
    """Let a module with observers see calibration batches, in place.

    Raises:
        StageFailed: it answers otherwise than the float model, the data does not fit the signature,
            an input or activation is NaN or infinite, all samples are equal, or an input is the
            same throughout.
    """
    seen = 0
    extremes = _Extremes(model.signature)
    with _finite(observed), torch.inference_mode(), quiet():
        for batch in varied(batches):
            refuse_misfit(batch.inputs, model.signature)
            extremes.take(batch.inputs)
            if seen == 0:
                _refuse_another(observed, model, batch.inputs)
            else:
                observed(*batch.inputs)
            seen += len(batch)
            report(seen)
    extremes.refuse_constant()


class _Extremes:
    """The smallest and largest number of each input."""

    def __init__(self, signature: Signature) -> None:
        self.of: dict[str, tuple[float, float]] = {}
        self.names = [spec.name for spec in signature.inputs]

    def take(self, inputs: Sequence[torch.Tensor]) -> None:
        for name, values in zip(self.names, inputs, strict=True):
            if values.is_floating_point() and values.numel():
                refuse_unless_finite(values, f"input {name}")
                low, high = self.of.get(name, (float("inf"), -float("inf")))
                self.of[name] = min(low, float(values.amin())), max(high, float(values.amax()))

    def refuse_constant(self) -> None:
        for name, (low, high) in self.of.items():
            if low == high:
                raise StageFailed(
                    f"calibration: input {name} is {low:g} in every sample, expected values that "
                    "vary; bring samples like those of use"
                )


@contextmanager
def _finite(observed: nn.Module) -> Iterator[None]:
    """Refuse NaN and infinity in what observers are given, for a block.

    Raises:
        StageFailed: there is one; the message names the place.
    """
    hooks = []
    sources = {}
    if isinstance(observed, fx.GraphModule):
        for node in observed.graph.find_nodes(op="call_module"):
            sources[str(node.target)] = str(getattr(node.args[0], "name", node.name))
    for name, part in observed.named_modules():
        if isinstance(part, ObserverBase | FakeQuantizeBase):
            where = sources.get(name) or name.rpartition(".")[0]

            def look(part: nn.Module, inputs: tuple[Any, ...], where: str = where) -> None:
                refuse_unless_finite(inputs[0], f"activation {where}")

            hooks.append(part.register_forward_pre_hook(look))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _refuse_another(observed: nn.Module, model: EagerModel, inputs: Sequence[torch.Tensor]) -> None:
    """Refuse a module with observers, which does not round yet, that is not the float model.

    torch.fx does not follow what is written in place into a tensor that others read.

    Raises:
        StageFailed: it answers otherwise, or torch's integer kernels would.
    """
    expected = run_in_eval(model.load(), inputs)
    with torch.no_grad():
        found = flatten_outputs(observed(*inputs))
    for a, b in zip(expected, found, strict=False):
        error = relative_error(a, b)
        if not error <= LARGEST_ERROR:
            raise StageFailed(
                f"torch.ao reads the model as another one: before any rounding its answers differ "
                f"by {error:.2g} of their norm, as where tensors are written in place that others "
                "read; use quantize_static, which follows that"
            )
    for node in observed.graph.nodes if isinstance(observed, fx.GraphModule) else ():
        if node.kwargs.get("alpha", 1) != 1:
            raise StageFailed(
                f"torch's integer addition ignores alpha={node.kwargs['alpha']} at {node.name}; "
                "multiply in the model's code, or use quantize_static"
            )


def is_integer(part: nn.Module) -> bool:
    """Whether a module is one of torch's integer layers with weights."""
    return type(part).__module__.startswith(INTEGER_LAYERS) and hasattr(part, "_FLOAT_MODULE")


def quantized_operators(module: nn.Module) -> Counter[str]:
    """Return the number of integer layers and operators by kind."""
    counts = Counter(type(part).__name__ for part in module.modules() if is_integer(part))
    if isinstance(module, fx.GraphModule):
        called = (str(n.target) for n in module.graph.nodes if n.op == "call_function")
        counts.update(n.split(".")[1] for n in called if n.startswith("quantized."))
    return counts


def float_modules(model: EagerModel, module: nn.Module) -> list[str]:
    """Return the names of a model's modules whose weights are floats in integer layers too."""
    integer = {name for name, part in module.named_modules() if is_integer(part)}
    return [
        name
        for name, part in model.load().named_modules()
        if name and name not in integer and any(p.dim() > 1 for p in part.parameters(recurse=False))
    ]
