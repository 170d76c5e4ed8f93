"""From a float module to an integer graph: trace, observe activations, round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compress.core.errors import StageFailed
from compress.core.program import export_program
from compress.quantization.pt2e import convert_pt2e, prepare_pt2e
from compress.quantization.quantizer import OnnxRuntimeQuantizer, module_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.export import ExportedProgram
    from torch.fx import GraphModule, Node

    from compress.core.data import Batch
    from compress.core.signature import Signature


def quantize(
    module: torch.nn.Module,
    signature: Signature,
    quantizer: OnnxRuntimeQuantizer,
    batches: Iterable[Batch],
    report: Callable[[int], None],
) -> ExportedProgram:
    """Return the module as a graph with integer weights and fixed activation ranges.

    Post-training quantization after Jacob et al., "Quantization and Training of Neural Networks for
    Efficient Integer-Arithmetic-Only Inference" (2018).

    Args:
        module: a module in eval mode; it is not changed.
        signature: its interface.
        quantizer: which operators are quantized, and how.
        batches: calibration inputs; one batch at a time is held in memory.
        report: called with the number of samples seen so far.

    Raises:
        StageFailed: nothing can be quantized, or an activation is not finite.
    """
    graph = export_program(module, signature).module(check_guards=False)
    prepared = prepare_pt2e(graph, quantizer)
    if not quantizer.quantized:
        raise StageFailed(
            "no operator could be quantized; expected a float32 convolution or linear layer "
            "that `exclude` does not name"
        )
    observe_(prepared, signature, batches, report)
    converted = convert_pt2e(prepared)
    drop_unread_tensors_(converted)
    return export_program(converted, signature)


def observe_(
    prepared: GraphModule,
    signature: Signature,
    batches: Iterable[Batch],
    report: Callable[[int], None],
) -> None:
    """Run batches through a prepared graph, whose observers then know each activation's range.

    Raises:
        StageFailed: an input or activation is NaN or infinite; the message names the place.
    """
    for node in prepared.graph.nodes:
        if node.op == "call_module":
            prepared.get_submodule(str(node.target)).register_forward_pre_hook(
                _finite_check(node.args[0])
            )
    seen = 0
    with torch.inference_mode():
        for batch in batches:
            for spec, values in zip(signature.inputs, batch.inputs, strict=True):
                _refuse_unless_finite(values, f"input {spec.name}")
            prepared(*batch.inputs)
            seen += len(batch)
            report(seen)


def drop_unread_tensors_(graph: GraphModule) -> None:
    """Remove the float weights that integer ones have replaced, in place."""
    read = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    for name, _ in [*graph.named_parameters(), *graph.named_buffers()]:
        if name not in read:
            owner, _, attribute = name.rpartition(".")
            delattr(graph.get_submodule(owner), attribute)


def _finite_check(node: Node) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]:
    place = f"{node.name} of {(module_names(node) or ['the model'])[-1]}"
    if node.op == "get_attr":
        place = f"weight {node.target}"

    def check(observer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        _refuse_unless_finite(inputs[0], place)

    return check


def _refuse_unless_finite(values: torch.Tensor, place: str) -> None:
    if not torch.isfinite(values).all():
        raise StageFailed(
            f"calibration: {place} is NaN or infinite, expected finite numbers; mend the data or "
            "the weights"
        )
