"""Networks whose export is hard, written by hand; axes that a user would leave open have names."""

from __future__ import annotations

from pathlib import Path

from compress.common.signature import Dimension, Dtype, Signature, TensorSpec
from tests.compress.pruning.zoo.registry import Case

HERE = Path(__file__).parent
BATCH = "batch"


def spec(name: str, *shape: Dimension, dtype: Dtype = "float32") -> TensorSpec:
    """Return an input whose first axis is the batch."""
    return TensorSpec(name=name, shape=(BATCH, *shape), dtype=dtype)


def words(*names: str, length: Dimension = "sequence") -> tuple[TensorSpec, ...]:
    """Return inputs of word indices, of any length."""
    return tuple(spec(name, length, dtype="int64") for name in names)


def _case(name: str, factory: str, *specs: TensorSpec, **arguments: object) -> Case:
    example = Signature(inputs=specs).example
    where = f"export_nets:{factory}"
    return Case(name, where, example, dict(arguments), folder=HERE, specs=specs)


OPEN_IMAGE = spec("image", 3, "height", "width")
HARD: tuple[Case, ...] = (
    _case("tagger_lstm", "Tagger", *words("words")),
    _case("tagger_gru", "Tagger", *words("words"), kind="GRU"),
    _case("forecaster", "Forecaster", spec("series", "time", 3), spec("state", 16)),
    _case("segmenter", "Segmenter", OPEN_IMAGE),
    _case("dilated", "Dilated", OPEN_IMAGE),
    _case("detector", "Detector", spec("image", 3, 32, 32)),
    _case("spectral", "Spectral", spec("wave", 256)),
    _case("ranker", "Ranker", spec("categories", 3, dtype="int64"), spec("numbers", 5)),
    _case("pooled", "Pooled", *words("words"), spec("mask", "sequence", dtype="bool")),
    _case(
        "cached",
        "Cached",
        spec("word", 1, dtype="int64"),
        spec("keys", "past", 4, 8),
        spec("values", "past", 4, 8),
    ),
    _case("cond", "Cond", spec("x", 8)),
    _case("branch", "Branch", spec("x", 8)),
    _case("early", "Early", spec("x", "length", 8)),
    _case("video", "Video", spec("clip", 3, "frames", 8, 8)),
    _case("gate", "Gate", OPEN_IMAGE),
    _case("biased", "Biased", spec("x", 6, 16)),
    _case("own_function", "OwnFunction", spec("x", 8)),
    _case("diffuser", "Diffuser", spec("image", 3, 8, 8), spec("time", dtype="int64")),
)
