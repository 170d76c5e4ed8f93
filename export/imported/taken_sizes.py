"""Finds the sizes of named axes that an ONNX file takes, by calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from compress.common.errors import ArtifactInvalid
from compress.common.lazy_modules import torch
from compress.common.signature import AxisBounds, Signature

SIZES = (8, 16, 32, 64, 128, 256, 512)
"""Sizes that are tried, of all axes but the batch at once: networks halve their inputs up to nine
times, and join halves that must fit."""

LARGEST_CALLED = 2**28
"""Bytes of a model that is called to find sizes, whenever it is named: larger ones take seconds."""


def with_taken_sizes(file: Path, signature: Signature) -> Signature:
    """Return the signature with what the file says of no axis: its smallest size, its multiple.

    A batch of which it takes one sample alone gets the number in place of the name: of more it may
    give outputs of other ranks than it declares. An axis is left as it is where the file takes no
    other size of it alone, as it may have to equal another one, and all are where the file cannot
    be opened, which its import explains.
    """
    import onnx
    import onnxruntime

    from compress.graph.from_onnx.reading import load

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4  # a refusal is no error here
    try:
        session = onnxruntime.InferenceSession(str(file), options, ["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001 - onnxruntime's own types derive from it alone
        return signature
    declared = [v.type.tensor_type for v in onnx.load(file, load_external_data=False).graph.output]
    ranks = [len(t.shape.dim) if t.HasField("shape") else None for t in declared]
    module = None
    with suppress(ArtifactInvalid):  # operators that PyTorch lacks
        module = load(file)

    def takes(sizes: Mapping[str, int]) -> bool:
        inputs = signature.example(sizes=sizes)
        feed = {spec.name: x.numpy() for spec, x in zip(signature.inputs, inputs, strict=True)}
        try:
            outputs = session.run(None, feed)
            if any(rank not in (None, x.ndim) for rank, x in zip(ranks, outputs, strict=True)):
                return False  # a Squeeze without axes, made for one sample
            # ONNX Runtime goes on where a convolution or a pool has nothing left of its input.
            if module is not None:
                with torch.no_grad():
                    module(*inputs)
        except Exception:  # noqa: BLE001 - onnxruntime's own types derive from it alone
            return False
        return True

    batch = signature.batch_axis
    others = [axis for axis in signature.dynamic_axes if axis != batch]
    tried = (
        {**dict.fromkeys(others, size), **({batch: rows} if batch else {})}
        for size in SIZES
        for rows in ((2, 1) if batch else (1,))
    )
    usual = next(filter(takes, tried), None)
    if usual is None:
        return signature
    found = {axis: bounds_of(axis, usual, takes) for axis in others}
    bounded = {axis: bounds for axis, bounds in found.items() if bounds != AxisBounds()}
    one_alone: dict[int | str, int] = {batch: 1} if batch and usual[batch] == 1 else {}
    inputs = tuple(
        spec.model_copy(update={"shape": tuple(one_alone.get(axis, axis) for axis in spec.shape)})
        for spec in signature.inputs
    )
    return signature.model_copy(update={"inputs": inputs, "axes": bounded})


def bounds_of(
    axis: str, usual: Mapping[str, int], takes: Callable[[Mapping[str, int]], bool]
) -> AxisBounds:
    """Return the sizes that an axis may have, the others at sizes that fit."""
    size, step = usual[axis], 1
    while not takes({**usual, axis: size + step}):
        if step == size:
            return AxisBounds()
        step *= 2
    # At the smallest size an inner one is 1, which torch.export takes for a constant.
    if step > 1:
        return AxisBounds(min=max(size, 2 * step), multiple=step)
    least, most = 0, size  # what it does not take, and what it does
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if takes({**usual, axis: middle}) else (middle, most)
    return AxisBounds(min=2 * most) if most > 1 else AxisBounds()
