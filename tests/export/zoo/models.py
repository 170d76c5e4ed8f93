"""The export zoo: models of pruning's zoo, more of transformers, and networks hard to export.

Each is a :class:`~tests.compress.pruning.zoo.registry.Case`; axes that a user would leave open
(words, time, height and width) have names.
"""

from __future__ import annotations

from dataclasses import replace

from compress.common.signature import Signature, TensorSpec
from tests.compress.pruning.zoo import architectures, registry
from tests.compress.pruning.zoo.registry import Case
from tests.export.zoo import more_architectures
from tests.export.zoo.hard import BATCH, HARD, spec, words

WORDS = words("input_ids", "attention_mask")
IDS = words("input_ids")
IMAGE = (spec("pixel_values", 3, 32, 32),)
WAVE = (spec("input_values", 400),)
MORE: dict[str, tuple[TensorSpec, ...]] = {
    **dict.fromkeys(("xlm_roberta", "squeezebert", "convbert", "modernbert"), WORDS),
    **dict.fromkeys(("fnet", "xlnet"), words("input_ids", length=8)),
    **dict.fromkeys(("gpt_neo", "gemma2", "phi3", "olmo", "mixtral"), IDS),
    "marian": words("input_ids", "attention_mask", "decoder_input_ids"),
    **dict.fromkeys(("dinov2", "siglip", "yolos", "dpt", "efficientnet", "regnet"), IMAGE),
    "poolformer": IMAGE,
    "mobilevit": (spec("pixel_values", 3, 64, 64),),
    **dict.fromkeys(("hubert", "sew"), WAVE),
    "ast": (spec("input_values", 32, 16),),
    "videomae": (spec("pixel_values", 4, 3, 32, 32),),
}
OPEN = ("bert", "bert_classifier", "distilbert", "albert", "electra", "clip_text", "mamba")
"""Models whose length pruning's zoo writes as a number, and which is named here."""


def _known(case: Case) -> Case:
    if case.name not in OPEN:
        return case
    specs = tuple(s.model_copy(update={"shape": (BATCH, "sequence")}) for s in case.specs)
    return replace(case, specs=specs, inputs=Signature(inputs=specs).example)


def _more(name: str) -> Case:
    specs = MORE[name]
    example = Signature(inputs=specs).example
    factory = f"{more_architectures.__name__}:build"
    return Case(name, factory, example, {"name": name}, specs=specs)


TRANSFORMERS = (*map(_known, architectures.TRANSFORMERS), *map(_more, MORE))
KINDS = (
    *("separable", "dense", "shuffled", "grouped", "transposed", "mha_cross", "encoder", "decoder"),
    *("einsum", "both_ways_lstm", "both_ways_gru", "cells", "speech", "inverted_residual"),
    *("inception", "unet", "transposed_groups", "group_norm", "instance_norm", "signal", "volume"),
    *("selective_kernel", "pyramid", "experts", "several_ways", "shared_embedding", "res2net"),
    *("rotary", "state_space", "unfolded", "resampled", "graph", "unknown_operator"),
)
"""Models of pruning's zoo, one of each kind."""
HAND = (*HARD, *(case for case in registry.HAND if case.name in KINDS))
ZOO = {case.name: case for case in (*HAND, *TRANSFORMERS)}
