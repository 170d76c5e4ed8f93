"""Integers of a few bits in GGUF's blocks of 32 numbers, and back.

A block begins with its scale d in half precision, `Q4_1` also with its smallest number m. A number
is `d · (q - 128)` in `Q8_0`, `d · (q - 8)` in `Q4_0`, and `d · q + m` in `Q4_1`. The first 16 of a
block's 4-bit integers are the lower halves of its bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from compress.artifacts.streaming.packed_weight import PackedWeight

BLOCK = 32
BlockType = Literal["Q8_0", "Q4_0", "Q4_1"]
HEADER = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4}
"""Bytes of a block before its integers."""


def block_type(weight: PackedWeight) -> BlockType | None:
    """Return the type of blocks that holds a weight's integers; None where GGUF has none."""
    if weight.group_size % BLOCK:
        return None
    if bool((weight.zero_point == 2 ** (weight.bits - 1)).all()):
        return "Q8_0" if weight.bits == 8 else "Q4_0"
    return "Q4_1" if weight.bits == 4 else None


def blocks_of(name: str, weight: PackedWeight) -> NDArray[np.uint8]:
    """Return a weight's blocks as bytes, `(outputs, bytes of a row)`.

    Raises:
        StageFailed: GGUF has no such type, or a scale leaves the range of half precision.
    """
    kind = block_type(weight)
    if kind is None:
        if weight.group_size % BLOCK:
            raise StageFailed(
                f"{name}: GGUF shares scales by {BLOCK} numbers, found {weight.group_size}; set "
                "group_size"
            )
        raise StageFailed(
            f"{name}: GGUF has no type of 8 bits with zero points; set symmetric: true in "
            "quantize_weights, or bits: 4"
        )
    outputs, groups = weight.scale.shape
    per_group = weight.group_size // BLOCK
    with np.errstate(over="ignore"):
        scale = weight.scale.repeat_interleave(per_group, 1).numpy()[..., None]
        smallest = -weight.zero_point.float() * weight.scale
        smallest_half = smallest.repeat_interleave(per_group, 1).numpy()[..., None]
        headers = [scale.astype("<f2")]
        if kind == "Q4_1":
            headers.append(smallest_half.astype("<f2"))
    if not all(np.isfinite(header).all() for header in headers):
        raise StageFailed(f"{name}: a scale of {weight.scale.max():.3g} is beyond half precision")
    integers = weight.integers().numpy().reshape(outputs, groups * per_group, BLOCK)
    if kind == "Q8_0":
        packed = (integers.astype(np.int16) - 128).astype(np.int8).view(np.uint8)
    else:
        packed = integers[..., : BLOCK // 2] | (integers[..., BLOCK // 2 :] << 4)
    blocks = [*(header.view(np.uint8) for header in headers), packed]
    return np.concatenate(blocks, axis=-1).reshape(outputs, -1)


def integers_of(blocks: NDArray[np.uint8], kind: BlockType) -> NDArray[np.uint8]:
    """Return the integers of a tensor's blocks, `(outputs, inputs)`, as `PackedWeight` has them."""
    header = HEADER[kind]
    rows = blocks.reshape(len(blocks), -1, header + (BLOCK if kind == "Q8_0" else BLOCK // 2))
    packed = rows[..., header:]
    if kind == "Q8_0":
        integers = (packed.view(np.int8).astype(np.int16) + 128).astype(np.uint8)
    else:
        integers = np.concatenate((packed & 15, packed >> 4), axis=-1)
    return integers.reshape(len(blocks), -1)
