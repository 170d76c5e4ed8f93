"""The zoo's list: every model that pruning is tried on, by name.

A :class:`Case` says how a model is built, what it takes, and what may stay as it is:

    case = CASES["mlp"]
    module = case.build()            # a fresh module in eval mode, seeded, BatchNorms not trivial
    outputs = module(*case.inputs(3))  # a batch of 3, drawn from torch's global generator

``HAND`` holds the modules written by hand; another list is made the same way and added to
``CASES``. The table in the documents is made from the names and the first lines of the factories'
docstrings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from compress.artifacts.recipe import Recipe
from compress.common.factories import resolve
from compress.common.signature import OutputSpec, Signature, TensorSpec

ZOO = Path(__file__).parent
PRUNING = ZOO.parent

Inputs: TypeAlias = Callable[[int], tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """A model of the zoo."""

    name: str
    factory: str
    """``module:callable``, looked up in ``folder`` first."""
    inputs: Inputs
    """Batch size → inputs; the first axis of each is the batch."""
    arguments: dict[str, object] = field(default_factory=dict)
    """Keyword arguments of the factory."""
    stays: str = ""
    """Part of a reason for which all channels may stay; empty: a real amount must leave."""
    folder: Path = ZOO
    """Where the factory's source lies."""
    specs: tuple[TensorSpec, ...] = ()
    """The inputs, where more axes than the batch have names."""

    @property
    def recipe(self) -> Recipe:
        """How the model is built."""
        return Recipe(factory=self.factory, arguments=self.arguments)

    @property
    def signature(self) -> Signature:
        """The model's interface; the batch axis is dynamic where nothing else is said."""
        if self.specs:
            return Signature(inputs=self.specs)
        tensors = self.inputs(2)
        return Signature(
            inputs=tuple(
                TensorSpec(
                    name=f"input_{i}",
                    shape=("batch", *x.shape[1:]),
                    dtype=str(x.dtype).removeprefix("torch."),
                )
                for i, x in enumerate(tensors)
            )
        )

    @property
    def about(self) -> str:
        """The first line of what the factory says of itself."""
        return (resolve(self.factory, self.folder).__doc__ or "").strip().partition("\n")[0]

    def build(self, seed: int = 0) -> nn.Module:
        """Return the module in eval mode; no statistic of BatchNorm is zero or one."""
        torch.manual_seed(seed)
        module = self.recipe.build(self.folder).eval()
        for layer in module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats:
                layer.running_mean.uniform_(-1, 1)
                layer.running_var.uniform_(0.5, 2)
        return module


def floats(*shape: int) -> Inputs:
    """Return a maker of one input of floats."""
    return lambda batch: (torch.randn(batch, *shape),)


def tokens(length: int, words: int) -> Inputs:
    """Return a maker of one input of word indices."""
    return lambda batch: (torch.randint(0, words, (batch, length)),)


def both(*makers: Inputs) -> Inputs:
    """Return a maker of several inputs."""
    return lambda batch: tuple(x for make in makers for x in make(batch))


def _old(name: str, factory: str, inputs: Inputs, stays: str = "", **arguments: object) -> Case:
    return Case(name, factory, inputs, dict(arguments), stays, PRUNING)


IMAGE, VECTOR, SEQUENCE = floats(1, 8, 8), floats(4), floats(5, 8)

HAND: tuple[Case, ...] = (
    _old("mlp", "pruning_linear_nets:mlp", VECTOR),
    _old("flattened", "pruning_nets:Flattened", IMAGE),
    _old("separable", "pruning_nets:Separable", IMAGE),
    _old("dense", "pruning_nets:Dense", IMAGE),
    _old("shuffled", "pruning_nets:Shuffled", IMAGE),
    _old("grouped", "pruning_nets:Grouped", IMAGE),
    _old("zero_padded", "pruning_nets:ZeroPadded", IMAGE),
    _old("upsampled", "pruning_nets:Upsampled", IMAGE),
    _old("pixel_shuffled", "pruning_nets:PixelShuffled", IMAGE),
    _old("reused", "pruning_nets:Reused", IMAGE),
    _old("raw", "pruning_nets:Raw", IMAGE),
    _old("transformer", "pruning_linear_nets:Transformer", tokens(8, 11)),
    _old("grouped_queries", "pruning_linear_nets:Transformer", tokens(8, 11), heads=4, key_heads=2),
    _old("by_hand", "pruning_linear_nets:ByHand", SEQUENCE),
    _old("fused", "pruning_linear_nets:Fused", SEQUENCE),
    _old("tied", "pruning_linear_nets:Tied", floats(8)),
    _old("transposed", "pruning_linear_nets:Transposed", floats(8)),
    _old("recurrent", "pruning_linear_nets:Recurrent", floats(5, 4)),
    _old("unknown_operator", "pruning_linear_nets:UnknownOperator", VECTOR),
    _old("hidden_width", "pruning_linear_nets:HiddenWidth", VECTOR),
    _old("multi_head", "pruning_linear_nets:MultiHead", floats(5, 16)),
    _old("in_place_on_a_view", "pruning_linear_nets:InPlaceOnAView", VECTOR),
    _old("computed", "pruning_linear_nets:Computed", floats(5, 4)),
    _old("outer", "pruning_linear_nets:Outer", VECTOR),
    _old("disagreeing", "pruning_linear_nets:Disagreeing", VECTOR),
)


def _new(name: str, factory: str, inputs: Inputs, stays: str = "", **arguments: object) -> Case:
    return Case(name, factory, inputs, dict(arguments), stays)


def flags(length: int) -> Inputs:
    """Return a maker of one input of truth values."""
    return lambda batch: (torch.rand(batch, length) < 0.3,)


PADDED = both(floats(5, 32), flags(5))

HAND += (
    _new("mha", "attention_nets:SelfAttention", PADDED),
    _new("mha_sequence_first", "attention_nets:SelfAttention", PADDED, batch_first=False),
    _new("mha_no_bias", "attention_nets:SelfAttention", PADDED, bias=False, dropout=0.1),
    _new(
        "mha_cross",
        "attention_nets:CrossAttention",
        both(floats(5, 32), floats(7, 12), floats(7, 20)),
    ),
    _new(
        "mha_cross_weights",
        "attention_nets:CrossAttention",
        both(floats(5, 32), floats(7, 12), floats(7, 20)),
        need_weights=True,
    ),
    _new("mha_seen_weights", "attention_nets:SeenWeights", floats(5, 32)),
    _new("encoder", "attention_nets:Encoder", tokens(6, 13)),
    _new(
        "encoder_norm_first",
        "attention_nets:Encoder",
        tokens(6, 13),
        norm_first=True,
        activation="gelu",
    ),
    _new("encoder_nested", "attention_nets:Encoder", tokens(6, 13), nested=True),
    _new("decoder", "attention_nets:Decoder", both(tokens(6, 13), tokens(4, 13))),
    _new(
        "whole_transformer", "attention_nets:WholeTransformer", both(floats(6, 16), floats(4, 16))
    ),
    _new("window", "attention_nets:Window", IMAGE),
    _new("batched_heads", "attention_nets:Batched", floats(5, 16)),
    _new("einsum", "attention_nets:Einsum", floats(5, 16)),
    _new("heads_in_a_list", "attention_nets:HeadsInAList", floats(5, 16)),
    _new("written_heads", "attention_nets:WrittenHeads", floats(5, 16)),
    _new("shared_configuration", "attention_nets:SharedConfiguration", floats(5, 16)),
    _new("both_ways_lstm", "recurrent_nets:BothWays", floats(5, 6)),
    _new(
        "both_ways_gru", "recurrent_nets:BothWays", floats(5, 6), kind="GRU", layers=1, bias=False
    ),
    _new("projected", "recurrent_nets:Projected", floats(5, 6)),
    _new("given_state", "recurrent_nets:GivenState", floats(5, 6)),
    _new("learned_state", "recurrent_nets:LearnedState", floats(5, 6)),
    _new("cells", "recurrent_nets:Cells", floats(5, 6)),
    _new("lstm_by_hand", "recurrent_nets:ByHand", floats(5, 6)),
    _new("speech", "recurrent_nets:SpeechNet", floats(8, 6)),
    _new("inverted_residual", "convolution_nets:InvertedResidual", IMAGE),
    _new("multiplier", "convolution_nets:Multiplier", IMAGE),
    _new("inception", "convolution_nets:Inception", IMAGE),
    _new("unet", "convolution_nets:UNet", IMAGE),
    _new("transposed_groups", "convolution_nets:TransposedGroups", IMAGE),
    _new("group_norm", "convolution_nets:GroupNormed", IMAGE),
    _new("group_norm_of_one", "convolution_nets:GroupNormed", IMAGE, groups=32, affine=False),
    _new(
        "layer_norm_of_groups", "convolution_nets:GroupNormed", IMAGE, groups=1, stays="statistics"
    ),
    _new("instance_norm", "convolution_nets:Instance", IMAGE),
    _new("plain_batch_norm", "convolution_nets:Plain", IMAGE),
    _new("signal", "convolution_nets:Signal", floats(3, 12)),
    _new("volume", "convolution_nets:Volume", floats(1, 4, 4, 4)),
    _new("selective_kernel", "convolution_nets:SelectiveKernel", IMAGE),
    _new("softmax_over_channels", "convolution_nets:SoftmaxOverChannels", IMAGE),
    _new("space_to_depth", "vision_nets:SpaceToDepth", IMAGE),
    _new("convnext", "vision_nets:ConvNext", IMAGE),
    _new("vit", "vision_nets:ViT", IMAGE),
    _new("mixer", "vision_nets:Mixer", IMAGE),
    _new("written_view", "vision_nets:WrittenView", IMAGE),
    _new("kept_view", "vision_nets:KeptView", IMAGE),
    _new("reparametrized", "vision_nets:Reparametrized", IMAGE),
    _new("weight_standardized", "vision_nets:WeightStandardized", IMAGE),
    _new("pyramid", "vision_nets:Pyramid", IMAGE),
    _new("stretched", "vision_nets:Stretched", IMAGE),
    _new("glu", "feature_nets:Glu", floats(8)),
    _new("split_by_sizes", "feature_nets:SplitBySizes", floats(8)),
    _new("indexed", "feature_nets:Indexed", floats(8)),
    _new("buffers", "feature_nets:Buffers", floats(8)),
    _new("several_ways", "feature_nets:SeveralWays", both(tokens(6, 13), IMAGE)),
    _new("frozen", "feature_nets:Frozen", floats(8)),
    _new("shared_embedding", "feature_nets:SharedEmbedding", both(tokens(6, 13), tokens(6, 13))),
    _new("film", "feature_nets:Film", both(IMAGE, VECTOR)),
    _new("experts", "feature_nets:Experts", floats(8)),
    _new("normalized", "feature_nets:Normalized", floats(8)),
    _new("maxout", "feature_nets:Maxout", floats(8)),
    _new("hyper", "feature_nets:Hyper", floats(8)),
    _new("rest", "feature_nets:Rest", tokens(6, 13)),
    _new("half", "feature_nets:Half", SEQUENCE),
)

HAND += (
    _new("res2net", "block_nets:Res2Net", IMAGE),
    _new("cross_stage", "block_nets:CrossStage", IMAGE),
    _new("ghost", "block_nets:Ghost", IMAGE),
    _new("efficient_gate", "block_nets:Efficient", IMAGE),
    _new("rotary", "block_nets:Rotary", floats(5, 16)),
    _new("rotary_shared", "block_nets:Rotary", floats(5, 16), shared=True),
    _new("state_space", "block_nets:StateSpace", SEQUENCE),
    _new("modulated", "block_nets:Modulated", both(floats(5, 16), floats(8))),
    _new("quantized_codes", "block_nets:Quantized", floats(8)),
    _new("unfolded", "block_nets:Unfolded", IMAGE),
    _new("resampled", "block_nets:Resampled", IMAGE),
    _new("graph", "block_nets:Graph", both(floats(6, 8), floats(6, 6))),
)

HAND += (
    _new("nano_gpt", "sized_nets:NanoGPT", tokens(6, 13)),
    _new("patch_attention", "sized_nets:PatchAttention", floats(5, 32)),
    _new("shared_keys", "sized_nets:SharedKeys", floats(5, 32)),
    _new("shuffle_net_v2", "sized_nets:ShuffleNetV2", IMAGE),
)

CASES = {case.name: case for case in HAND}


def name_outputs(signature: Signature, count: int) -> Signature:
    if len(signature.outputs) == count:
        return signature
    outputs = tuple(OutputSpec(name=f"output_{i}") for i in range(count))
    return signature.model_copy(update={"outputs": outputs})
