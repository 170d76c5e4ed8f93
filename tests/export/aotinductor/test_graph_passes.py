"""Weights are packed as kernels want them at the size that they meet, and stay what they were."""

import pytest
import torch
from torch import fx

from compress.export.aotinductor.package import PackAndCount

pytestmark = pytest.mark.skipif(
    not torch.cpu.get_capabilities().get("avx512_vnni"), reason="orders of AVX-512's kernels"
)
CHANNELS, SIDE = 512, 7
SPREAD: list[list[int]] = [[1, 1], [1, 1], [1, 1]]


def convolution(weight: torch.Tensor) -> fx.GraphModule:
    """Return an integer convolution as Inductor leaves it where the batch is dynamic."""
    scales = torch.full((CHANNELS,), 0.01)
    packed = torch.ops.onednn.qconv_prepack(weight, scales, 0.1, 3, *SPREAD, 1, None)
    held = {"packed": packed, "scales": scales, "zeros": torch.zeros(CHANNELS, dtype=torch.int32)}
    graph = fx.Graph()
    image = graph.placeholder("image")
    image.meta["val"] = torch.empty(2, CHANNELS, SIDE, SIDE, dtype=torch.uint8, device="meta")
    packed_node, *others = (graph.get_attr(name) for name in held)
    packed_node.meta["val"] = torch.empty_like(weight, device="meta")
    kernel = torch.ops.onednn.qconv_pointwise.default
    rest = (None, *SPREAD, 1, 1.0, 0, torch.float32, "none", [], "")
    product = graph.call_function(kernel, (image, 0.1, 3, packed_node, *others, *rest))
    product.meta["val"] = torch.empty(2, CHANNELS, SIDE, SIDE, device="meta")
    graph.output(product)
    return fx.GraphModule(held, graph)


def test_a_weight_is_packed_anew_for_the_size_of_the_image() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (CHANNELS, CHANNELS, 3, 3), generator=generator)
    module = convolution(weight.to(torch.int8))
    image = torch.randint(0, 256, (2, CHANNELS, SIDE, SIDE), generator=generator)
    image = image.to(torch.uint8).contiguous(memory_format=torch.channels_last)
    before = module(image)
    counted = PackAndCount()
    counted(module.graph)
    module.recompile()
    (name,) = (n.target for n in module.graph.nodes if n.op == "get_attr" and "_for_" in n.target)
    scales = torch.full((CHANNELS,), 0.01)
    here = torch.ops.onednn.qconv_prepack(
        module.packed.to_dense(), scales, 0.1, 3, *SPREAD, 1, [1, CHANNELS, SIDE, SIDE]
    )
    assert _order(getattr(module, name)) == _order(here)
    if torch.__version__ < "2.15":  # which packs them so by itself
        assert _order(here) != _order(module.packed)
    assert torch.equal(module(image), before)
    assert counted.macs == {True: 2 * SIDE * SIDE * CHANNELS * CHANNELS * 9}


def _order(packed: torch.Tensor) -> list[int]:
    """Return how a packed weight lies in memory, as oneDNN describes it."""
    return torch.ops.mkldnn._get_mkldnn_serialized_md(packed).tolist()
