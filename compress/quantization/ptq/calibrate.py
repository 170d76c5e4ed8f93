"""From a float module to an integer graph: trace, observe activations, round."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING

import torch

from compress.common.errors import StageFailed
from compress.graph.library_cache import cached_composite_ops
from compress.graph.torch_export import export_program
from compress.quantization.algorithms.embedding_quant import look_up_integers_
from compress.quantization.config.calibration_data import varied
from compress.quantization.pt2e.bn_fusion import part_from_layers_read_elsewhere_
from compress.quantization.pt2e.observer_ranges import (
    Watches,
    fit_ranges_,
    refuse_unless_finite,
    watching,
)
from compress.quantization.pt2e.torchao_api import convert_pt2e, prepare_pt2e
from compress.quantization.ptq.algorithm_sequence import Corrections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.export import ExportedProgram
    from torch.fx import GraphModule

    from compress.common.signature import Signature
    from compress.data.batch import Batch
    from compress.quantization.pt2e.quantizer import OnnxRuntimeQuantizer


def quantize(
    module: torch.nn.Module,
    signature: Signature,
    quantizer: OnnxRuntimeQuantizer,
    batches: Iterable[Batch],
    report: Callable[[int], None],
    corrections: Corrections | None = None,
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
        corrections: what is done so that the integers answer more like the module.

    Raises:
        StageFailed: nothing can be quantized, the data does not fit the signature or does not vary,
            or an activation is not finite or vanishes.
    """
    corrections = corrections or Corrections()
    graph = traced(module, signature)
    corrections.smooth_(graph, batches, quantizer.scheme, quantizer.exclude)
    prepared = prepare(graph, quantizer)
    corrections.equalize_(prepared)
    watches = observe_(prepared, signature, batches, report)
    fit_ranges_(prepared)
    quantizer.ranges = watches.facts()
    corrections.round_(prepared, batches)
    return integer_program(prepared, signature)


def prepare(graph: GraphModule, quantizer: OnnxRuntimeQuantizer) -> GraphModule:
    """Return a float graph with BatchNorm folded and an observer wherever numbers are rounded.

    Raises:
        StageFailed: nothing can be quantized.
    """
    part_from_layers_read_elsewhere_(graph)
    prepared: GraphModule = prepare_pt2e(graph, quantizer)
    if not quantizer.quantized:
        raise StageFailed(
            "no operator could be quantized; expected a float32 convolution or linear layer "
            "that `exclude` does not name"
        )
    return prepared


def integer_program(prepared: GraphModule, signature: Signature) -> ExportedProgram:
    """Return the integer form of a prepared graph, whose observers know their ranges.

    Args:
        prepared: the graph; it is used up.
        signature: the model's interface.
    """
    return export_program(integer_graph(prepared), signature)


def integer_graph(prepared: GraphModule) -> GraphModule:
    """Return the integer form of a prepared graph, which is used up."""
    converted: GraphModule = convert_pt2e(prepared)
    look_up_integers_(converted)
    drop_unread_tensors_(converted)
    return converted


def traced(module: torch.nn.Module, signature: Signature) -> GraphModule:
    """Return a module's graph, made functional; the module is not changed."""
    graph: GraphModule = functional(export_program(module, signature)).module(check_guards=False)
    return graph


def copied(graph: GraphModule, shared: Iterable[torch.Tensor] = ()) -> GraphModule:
    """Return a graph that can be changed, its observers and tensors copied with it.

    Args:
        graph: the graph; it is not changed.
        shared: tensors that both are to hold.
    """
    with _quiet_about_specs():
        return deepcopy(graph, {id(tensor): tensor for tensor in shared})


def functional(program: ExportedProgram) -> ExportedProgram:
    """Return a program that computes the same and writes into no tensor.

    Between rounding and its inverse a tensor is a copy: what is written into a view of it would not
    reach its other readers.
    """
    with _quiet_about_specs(), cached_composite_ops():
        decomposed: ExportedProgram = program.run_decompositions({})
        return decomposed


@contextmanager
def _quiet_about_specs() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
        yield


def observe_(
    prepared: GraphModule,
    signature: Signature,
    batches: Iterable[Batch],
    report: Callable[[int], None],
) -> Watches:
    """Run batches through a prepared graph, whose observers then know each activation's range.

    Returns:
        What passed the observers.

    Raises:
        StageFailed: the data does not fit the signature, an input or activation is NaN or infinite,
            all samples are equal, or an input is the same throughout.
    """
    seen = 0
    with watching(prepared, signature) as watches, torch.inference_mode():
        for batch in varied(batches):
            refuse_misfit(batch.inputs, signature)
            for spec, values in zip(signature.inputs, batch.inputs, strict=True):
                refuse_unless_finite(values, f"input {spec.name}")
            prepared(*batch.inputs)
            seen += len(batch)
            report(seen)
    watches.refuse_constant_inputs()
    return watches


def drop_unread_tensors_(graph: GraphModule) -> None:
    """Remove the float weights that integer ones have replaced, in place."""
    read = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    for name, _ in [*graph.named_parameters(), *graph.named_buffers()]:
        if name not in read:
            owner, _, attribute = name.rpartition(".")
            delattr(graph.get_submodule(owner), attribute)


def refuse_misfit(inputs: Sequence[torch.Tensor], signature: Signature) -> None:
    """Refuse inputs of another type or shape than the signature's.

    Raises:
        StageFailed: so they are; the message names both.
    """
    found = [(str(x.dtype).removeprefix("torch."), tuple(x.shape)) for x in inputs]
    expected = [(spec.dtype, spec.shape) for spec in signature.inputs]
    fits = len(found) == len(expected) and all(
        dtype == expected_dtype and _is_size_of(shape, expected_shape)
        for (dtype, shape), (expected_dtype, expected_shape) in zip(found, expected, strict=True)
    )
    if not fits:
        raise StageFailed(
            f"calibration: a batch of the data is {_described(found)}, expected "
            f"{_described(expected)}; mend the data or model.inputs"
        )


def _is_size_of(shape: tuple[int, ...], expected: tuple[int | str, ...]) -> bool:
    return len(shape) == len(expected) and all(
        isinstance(e, str) or e == n for n, e in zip(shape, expected, strict=True)
    )


def _described(tensors: Sequence[tuple[str, tuple[int | str, ...]]]) -> str:
    return " and ".join(f"{dtype} [{', '.join(map(str, shape))}]" for dtype, shape in tensors)
