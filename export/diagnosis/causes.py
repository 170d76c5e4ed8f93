"""Causes of a file that is too slow, too large, too little in integers, or wrong.

Thresholds were set on half of the injected faults of `benchmarks/explain_costs.py`. A cause of a
slow file is named only where the file without it was timed, and is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any

from compress.core.diagnosis.cause import (
    MACS_GATES,
    MEMORY_GATES,
    PARAMETER_GATES,
    PARITY_GATES,
    SIZE_GATES,
    SPEED_GATES,
    Cause,
    RefusedStage,
    Repair,
    excluding,
)
from compress.export.diagnosis.costs import LEAST_ERROR
from compress.export.diagnosis.profile import QUANTIZE
from compress.export.exporter import EXPORTERS
from compress.export.latency.resizing import weighted_layers
from compress.export.onnx.graph import sizes, stored

if TYPE_CHECKING:
    from compress.export.diagnosis.costs import (
        CountedCost,
        ParityDiagnosis,
        SizeDiagnosis,
        SpeedDiagnosis,
    )

    Slow = RefusedStage[SpeedDiagnosis]
    Counted = RefusedStage[CountedCost]
    Sized = RefusedStage[SizeDiagnosis]
    Wrong = RefusedStage[ParityDiagnosis]
    Settings = dict[str, Any]
    Timed = list[tuple[float, Repair]]  # milliseconds that changes save, and the changes

STATIC = ("quantize_static", "quantize_aware_training")
QUANTIZING = (*STATIC, "quantize_dynamic", "quantize_weights")
BYTE_GATES = (*SIZE_GATES, *MEMORY_GATES)  # weights are in memory too
BLOCK = 16  # channels that convolution kernels compute at once with AVX-512; 8 with AVX2
LARGEST_RATIO = 1e9  # of errors, in the place of infinity, which JSON does not have
IN_PYTORCH = Repair({"stage": "export_torchscript"}, 2)  # a file that PyTorch's own operators run


def _naming(own: Mapping[str, Any], layers: Iterable[str]) -> list[str]:
    """Return the patterns of `exclude` that name some layers."""
    patterns, names = own.get("exclude", ()), [*layers]
    return [p for p in patterns if any(fnmatchcase(layer, p) for layer in names)]


def _without_patterns(own: Mapping[str, Any], left_out: Sequence[str]) -> Settings:
    return {"exclude": [p for p in own["exclude"] if p not in left_out]}


def _formats_with_kernels(own: Mapping[str, Any]) -> Iterator[Settings]:
    """Yield changes of a quantization's settings to formats that onnxruntime has kernels for."""
    if own.get("activation_bits") not in (None, 8):
        yield {"activation_bits": 8}
    if own.get("target", "onnxruntime-cpu") != "onnxruntime-cpu":
        yield {"target": "onnxruntime-cpu"}


def _slow(saved: Callable[[Slow, Sequence[str]], float], **cause: Any) -> Cause:
    """Return a cause of a slow file, given the milliseconds that are saved without it."""

    def recovered_share(refused: Slow, layers: Sequence[str]) -> float:
        return refused.measured.recovered_share(saved(refused, layers))

    return Cause(gates=SPEED_GATES, recovered_share=recovered_share, **cause)


def _slow_and_timed(changes: Callable[[Slow, Sequence[str]], Timed], **cause: Any) -> Cause:
    """Return a cause of a slow file whose repairs are timed, and named where they are faster."""

    def repairs(refused: Slow, layers: Sequence[str]) -> tuple[Repair, ...]:
        timed = sorted(changes(refused, layers), key=lambda pair: -pair[0])
        return tuple(repair for ms, repair in timed if ms > 0)

    def saved(refused: Slow, layers: Sequence[str]) -> float:
        return max((ms for ms, _ in changes(refused, layers)), default=0.0)

    return _slow(saved, repairs=repairs, **cause)


def _float_island_share(refused: Slow, layer: str) -> float | None:
    islands = [i for i in refused.measured.profile.float_islands if layer in i.modules]
    return refused.measured.share(node for i in islands for node in (*i.nodes, *i.conversions))


def _without_islands(refused: Slow, layers: Sequence[str]) -> Timed:
    """Return the layers quantized, or in float with their neighbours."""
    measured, own = refused.measured, refused.stage.own_settings()
    if excluded := _naming(own, layers):
        left = _without_patterns(own, excluded)
        return [(measured.saved_with(refused.stage.title, left), Repair(left, 0))]
    islands = [i for i in measured.profile.float_islands if i.modules & {*layers}]
    # Its neighbours in float, too, make the conversions around it needless.
    around = {m for i in islands for m in i.around | i.modules if m in measured.layer_names}
    return [(measured.saved_in_float(around), excluding(own, sorted(around), 1))]


def _lone_pair_share(refused: Slow, layer: str) -> float | None:
    """Return the share of the time that the pairs behind a layer take, or all pairs."""
    if refused.stage.stage == "export_onnx" and refused.before.kind == "graph":
        return None  # of its quantization
    pairs = refused.measured.profile.lone_pairs
    return refused.measured.share(n for n in pairs if layer in ("", n.module))


def _other_formats(refused: Slow, layers: Sequence[str]) -> tuple[Repair, ...]:
    """Return formats that the runtime has kernels for, and the layers in float."""
    own = refused.stage.own_settings()
    found = [Repair(settings, 0) for settings in _formats_with_kernels(own)]
    return (*found, excluding(own, layers, 1)) if "exclude" in own else tuple(found)


def _missing_in_block(refused: Slow, layer: str) -> float | None:
    """Return how many channels are missing in the last block, as a share of the layer's."""
    measured, width = refused.measured, 0
    for name, node in zip(measured.layer_names, weighted_layers(measured.model), strict=False):
        weight = stored(node.inputs[1])
        if name == layer and node.op_type == "Conv" and weight is not None:
            width = sizes(weight)[0]
    return (math.ceil(width / BLOCK) * BLOCK - width) / width if width >= BLOCK // 2 else None


def _whole_blocks(refused: Slow, layers: Sequence[str]) -> Timed:
    own, title = refused.stage.own_settings(), refused.stage.title
    blocks = (BLOCK, BLOCK // 2)
    wider: list[Settings] = [{"round_to": block} for block in blocks if own["round_to"] % block]
    if own["widths"]:
        rounded = [
            {group: max(block, round(n / block) * block) for group, n in own["widths"].items()}
            for block in blocks
        ]
        wider = [{"widths": widths} for widths in rounded]
    return [(refused.measured.saved_with(title, s), Repair(s, 0)) for s in wider]


def _slowdown(refused: Slow, layer: str) -> float | None:
    measured = refused.measured
    before = measured.float_profile.by_module.get(layer, 0.0)
    now = measured.profile.by_module.get(layer, 0.0)
    return now / before if before and layer in measured.profile.integer_modules else None


def _other_runtimes(refused: Slow, layers: Sequence[str]) -> tuple[Repair, ...]:
    """Return the exporters of the installed runtimes that fuse more than onnxruntime does."""
    return tuple(
        Repair({"stage": exporter.model_fields["stage"].default}, 1)
        for kind, exporter in EXPORTERS.items()
        if exporter.runtime.from_onnx
        and kind != refused.after.kind
        and not any(need.missing() for need in exporter.runtime.requirements)
    )


# Of a gate that two measurements may answer either way. No stage has it: it is tested first.
NOISE = Cause(
    key="noise",
    stages=(),
    gates=SPEED_GATES,
    limit=1.0,
    text=(
        "cannot be told on this machine now: measurements lie {value:.3g} times as far apart as "
        "the limit is away (limit {limit:g}); run again when it has less to do"
    ),
    measure=lambda refused, layer: None if layer else refused.measured.gate.spread_in_margin,
)
SPEED_CAUSES = (
    # Operators in float between integer kernels, with conversions on both sides.
    _slow_and_timed(
        _without_islands,
        key="float_islands",
        stages=STATIC,
        limit=0.1,
        text="computed in float between integer kernels ({value:.0%} of the time; limit "
        "{limit:.0%})",
        measure=_float_island_share,
    ),
    # Values are rounded to integers and made floats again, and no kernel reads them in between.
    _slow(
        lambda refused, _: refused.measured.saved_without(
            n for n in refused.measured.profile.lone_pairs if n.node.op_type == QUANTIZE
        ),
        key="lone_pairs",
        stages=(*STATIC, "export_onnx"),
        limit=0.05,
        text="quantized and dequantized for no integer kernel ({value:.0%} of the time; "
        "limit {limit:.0%})",
        measure=_lone_pair_share,
        repairs=_other_formats,
    ),
    # Numbers of channels fill blocks of the kernels in part.
    _slow_and_timed(
        _whole_blocks,
        key="odd_widths",
        stages=("prune_channels",),
        limit=0.1,
        text="kernels compute blocks of 8 or 16 channels ({value:.0%} more than there are; "
        "limit {limit:.0%})",
        measure=_missing_in_block,
    ),
    # The layer's integer kernel takes longer than its float kernel.
    _slow(
        lambda refused, layers: refused.measured.saved_in_float(layers),
        key="slow_integers",
        stages=QUANTIZING,
        limit=1.25,
        text="slower in integers than in float ({value:.3g} times the time; limit {limit:g})",
        measure=_slowdown,
        repairs=lambda refused, layers: (excluding(refused.stage.own_settings(), layers, 1),),
    ),
    # Normalisations and activations are computed apart from the layer before them; without them the
    # file is as fast as with a kernel that fuses them, at best.
    _slow(
        lambda refused, _: refused.measured.saved_without(refused.measured.profile.unfused),
        key="unfused",
        stages=("export_onnx",),
        limit=0.1,
        text="normalisation or activation apart from its layer's kernel ({value:.0%} of the time; "
        "limit {limit:.0%})",
        measure=lambda refused, layer: refused.measured.share(
            n for n in refused.measured.profile.unfused if layer in ("", n.module)
        ),
        repairs=_other_runtimes,
    ),
    # The model is so small that most of a call is spent around its kernels.
    _slow(
        lambda refused, _: refused.measured.empty_call_ms,
        key="call_overhead",
        stages=("export_onnx",),
        limit=0.4,
        text="a call of any model takes {value:.0%} of the time (limit {limit:.0%}); larger "
        "batches share it",
        measure=lambda refused, layer: (
            None if layer else refused.measured.empty_call_ms / refused.measured.ms
        ),
    ),
    NOISE,
)


def _counted(
    changes: Callable[[RefusedStage[Any], Sequence[str]], Iterable[Settings]], **cause: Any
) -> Cause:
    """Return a cause of too many bytes, weights or products in float, given what mends it."""

    def recovered_share(refused: Counted, layers: Sequence[str]) -> float | None:
        measured, title = refused.measured, refused.stage.title
        saved = [measured.saved_with(title, change) for change in changes(refused, layers)]
        return measured.recovered_share(max(saved)) if saved else None

    def repairs(refused: Counted, layers: Sequence[str]) -> tuple[Repair, ...]:
        return tuple(Repair(change, 0) for change in changes(refused, layers))

    return Cause(recovered_share=recovered_share, repairs=repairs, **cause)


def _tables_in_integers(refused: Sized, layers: Sequence[str]) -> Iterator[Settings]:
    own = refused.stage.own_settings()
    excluded = _naming(own, layers)
    settings = {"embeddings": True} if own.get("embeddings") is False else {}
    if settings or excluded:
        yield settings | (_without_patterns(own, excluded) if excluded else {})


def _excluded_share(refused: Counted, layer: str) -> float | None:
    if not _naming(refused.stage.own_settings(), [layer]):
        return None
    # Pruning counts all channels that it may remove, quantization what is not in integers.
    is_pruned = refused.stage.stage == "prune_channels"
    return refused.measured.share_of(layer, floats_alone=not is_pruned)


def _nothing_excluded(refused: Counted, layers: Sequence[str]) -> Iterator[Settings]:
    own = refused.stage.own_settings()
    if excluded := _naming(own, layers):
        yield _without_patterns(own, excluded)


def _activation_share(refused: Sized, layer: str) -> float | None:
    measured = refused.measured
    if layer not in measured.activations:
        return None
    weights = sum(tensor.bytes for tensor in measured.tensors)
    return measured.activations[layer] / (weights + measured.peak_values)


COUNTED_CAUSES = (
    # Tables of embeddings that a quantized model holds in float.
    _counted(
        _tables_in_integers,
        key="float_tables",
        gates=BYTE_GATES,
        stages=(*QUANTIZING, "quantize_mixed"),
        limit=0.1,
        text="tables of embeddings left in float ({value:.0%} of the file; limit {limit:.0%})",
        measure=lambda refused, layer: refused.measured.share_where(
            layer, lambda t: t.is_table and t.is_float
        ),
    ),
    # Layers that `exclude` leaves in float, or whose channels it keeps.
    _counted(
        _nothing_excluded,
        key="excluded_layers",
        gates=(*BYTE_GATES, *PARAMETER_GATES, *MACS_GATES),
        stages=(*QUANTIZING, "quantize_mixed", "prune_channels"),
        limit=0.1,
        text="left out by exclude ({value:.0%} of the whole; limit {limit:.0%})",
        measure=_excluded_share,
    ),
    # Layers with weights in integers that the runtime multiplies in float all the same.
    _counted(
        lambda refused, _: _formats_with_kernels(refused.stage.own_settings()),
        key="float_kernels",
        gates=MACS_GATES,
        stages=QUANTIZING,
        limit=0.05,
        text="weights in integers, but a float kernel ({value:.0%} of the multiply-accumulates; "
        "limit {limit:.0%})",
        measure=lambda refused, layer: (
            refused.measured.share_of(layer, floats_alone=True)
            if layer in refused.measured.quantized
            else None
        ),
    ),
    # Tensors of the same values, of which one would do.
    Cause(
        key="stored_twice",
        stages=("export_onnx",),
        gates=(*BYTE_GATES, *PARAMETER_GATES),
        limit=0.05,
        text=(
            "the same values are stored twice ({value:.0%} of the file; limit {limit:.0%}); tie "
            "the modules' weights in the model's code"
        ),
        measure=lambda refused, layer: refused.measured.share_where(layer, lambda t: t.is_copy),
        recovered_share=lambda refused, _: refused.measured.recovered_share(
            sum(getattr(t, refused.measured.unit) for t in refused.measured.tensors if t.is_copy)
        ),
    ),
    # One value that takes most of the memory of a call.
    Cause(
        key="large_activation",
        stages=("export_onnx",),
        gates=MEMORY_GATES,
        limit=0.4,
        text=(
            "one value of a call takes {value:.0%} of the memory of weights and values (limit "
            "{limit:.0%}); smaller batches or inputs take less"
        ),
        measure=_activation_share,
    ),
)


def _ratio_at_other_sizes(refused: Wrong, layer: str) -> float | None:
    """Return the error at other sizes of an axis, as a multiple of that at its own."""
    measured = refused.measured
    if layer not in measured.axis_errors:
        return None
    # 1e-7: float32's rounding, as the error at its own size may be 0.
    own_size_error = max(measured.errors.get("seeded", math.inf), 1e-7)
    return min(measured.axis_errors[layer] / own_size_error, LARGEST_RATIO)  # it may be infinite


def _graph_share(refused: Wrong, layers: Sequence[str]) -> float | None:
    measured = refused.measured
    total = max((e for e in measured.errors.values() if math.isfinite(e)), default=0.0)
    return min(1.0, measured.graph_error / total) if total else None


def _rewriting_share(refused: Wrong, layer: str) -> float | None:
    measured = refused.measured
    if layer or measured.stage.optimize == "none" or not measured.difference:
        return None
    return 1 - measured.difference_unoptimized / measured.difference


def _float32_share(refused: Wrong, layer: str) -> float | None:
    """Return the source's own error over the difference."""
    measured = refused.measured
    if layer or measured.own_error is None or not measured.difference:
        return None
    return measured.own_error / measured.difference


def _operator_error(refused: Wrong, layer: str) -> float | None:
    found = refused.measured.wrong_layer
    return found.error if found is not None and layer == str(found) else None


_wrong = partial(Cause, stages=("export_onnx",), gates=PARITY_GATES)
# An operator whose ONNX form computes something else.
WRONG_OPERATOR = _wrong(
    key="wrong_operator",
    limit=LEAST_ERROR,
    text="the first operator out of tolerance (error {value:.2g} of its norm; limit {limit:g})",
    measure=_operator_error,
    repairs=lambda *_: (IN_PYTORCH,),
)
PARITY_CAUSES = (
    # A named axis whose size while tracing was kept as a number.
    _wrong(
        key="baked_axis",
        limit=100.0,
        text=(
            "right at the size that it was traced with, and wrong at others (error {value:.3g} "
            "times as large; limit {limit:g}); compute sizes from the input's shape in the "
            "model's code"
        ),
        measure=_ratio_at_other_sizes,
    ),
    # The traced graph computes other than the model's code does; a scripted one may not.
    _wrong(
        key="other_graph",
        limit=1e-4,
        text=(
            "the graph that torch.export traced is wrong in PyTorch too (by {value:.2g} of the "
            "norm; limit {limit:g}): code goes another way while it is exported, or keeps a value "
            "that depends on the input"
        ),
        measure=lambda refused, layer: (
            refused.measured.graph_error if refused.before.kind == "eager" and not layer else None
        ),
        recovered_share=_graph_share,
        repairs=lambda *_: (IN_PYTORCH,),
    ),
    # Rewriting ahead of time uses approximations.
    _wrong(
        key="rewritten_graph",
        limit=0.5,
        text="rewritten by optimize (without it {value:.0%} of the difference is gone; "
        "limit {limit:.0%})",
        measure=_rewriting_share,
        recovered_share=lambda refused, _: _rewriting_share(refused, ""),
        repairs=lambda *_: (Repair({"optimize": "none"}, 0),),
    ),
    # The source is off by as much itself, as float32 holds 7 digits.
    _wrong(
        key="float32",
        limit=0.25,
        text=(
            "float32 itself: the source is off its outputs in float64 by {value:.2g} of the "
            "difference (limit {limit:g}); the limit asks for more digits than float32 has"
        ),
        measure=_float32_share,
        recovered_share=lambda refused, _: (
            None if (value := _float32_share(refused, "")) is None else min(1.0, value)
        ),
    ),
    WRONG_OPERATOR,
)
CAUSES = (*SPEED_CAUSES, *COUNTED_CAUSES, *PARITY_CAUSES)
