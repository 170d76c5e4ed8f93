"""A module in torch's integer layers run beside its float model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.core.torch_ao import computing_with, quiet
from compress.quantization.comparison import compare_followed
from compress.quantization.following import Reference
from compress.quantization.native import is_integer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from compress.core.eager import EagerModel
    from compress.core.native import Native
    from compress.core.stage import Context
    from compress.quantization.deviation import Deviation
    from compress.quantization.fidelity import Fidelity
    from compress.quantization.following import Call


def compare_native(
    model: EagerModel, module: nn.Module, native: Native, context: Context
) -> Fidelity:
    """Return how near a model in integer layers stays to its float model.

    Raises:
        StageFailed: its answers are not finite where the float model's are.
    """
    parts = {n: p for n, p in module.named_modules() if n and not isinstance(p, nn.Identity)}
    layers = {name: part for name, part in parts.items() if is_integer(part)}
    reference = Reference(model.load(), set(layers), set(parts))
    with computing_with(native.engine), quiet():
        return compare_followed(reference, FollowedModule(module, layers), model.signature, context)


@dataclass(frozen=True)
class FollowedModule:
    """A module followed through its integer layers."""

    module: nn.Module
    layers: Mapping[str, nn.Module]
    """Integer layers by the names that their float ones had."""

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        expected: Mapping[Call, torch.Tensor],
        found: dict[str, Deviation],
        *,
        given: bool,
    ) -> Any:
        """Return the answers, and add up how far the layers are from what is expected."""
        calls: Counter[str] = Counter()

        def listener(name: str) -> Any:
            def listen(part: nn.Module, _: Any, output: Any) -> Any:
                right = expected.get((name, calls[name]))
                calls[name] += 1
                if right is None or getattr(output, "shape", None) != right.shape:
                    return None
                right = right.relu() if "ReLU" in type(part).__name__ else right
                found[name].add(right, output.dequantize() if output.is_quantized else output)
                return _like(right, output) if given else None

            return listen

        hooks = [part.register_forward_hook(listener(n)) for n, part in self.layers.items()]
        try:
            return self.module(*inputs)
        finally:
            for hook in hooks:
                hook.remove()


def _like(values: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """Return values in the format of an output."""
    if not output.is_quantized:
        return values
    scale, zero = output.q_scale(), output.q_zero_point()
    return torch.quantize_per_tensor(values, scale, zero, output.dtype)
