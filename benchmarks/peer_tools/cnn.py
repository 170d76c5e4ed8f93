"""Static int8 of a residual and a depthwise network on digits."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from quantizer.sources import trained
from safetensors.torch import save_file

from peer_tools import stored_data
from peer_tools.contest import Contest, percent

SAMPLES = 512
BENCHMARKS = Path(__file__).parents[1]
NETS = {
    "resnet20": ("quantizer.nets:resnet20", "ResNet-20, static int8"),
    "mobilenet": ("shapes:mobilenet", "A depthwise network, static int8"),
}
PIPELINE = """version: 1
name: {name}
threads: 1
code: {code}
model:
  factory: "{factory}"
  checkpoint: {checkpoint}
  inputs: [{{name: image, shape: [batch, 1, 8, 8]}}]
  outputs: [{{name: logits}}]
data: {{factory: "peer_tools.stored_data:read", arguments: {{file: {data}}}, batch_size: 128}}
metric: accuracy
"""


def tables(folder: Path, given: argparse.Namespace) -> Iterator[str]:
    """Yield a table for each network."""
    for name, (factory, title) in NETS.items():
        root = folder / name
        model, context = trained(root, name, "easy", 0, 2 if given.small else 12)
        checkpoint = root / "weights.safetensors"
        save_file(model.load().state_dict(), checkpoint)
        data = root / "data.safetensors"
        stored_data.write(context.data, 1, data)
        contest = Contest(
            name=name,
            pipeline=PIPELINE.format(
                name=name, code=BENCHMARKS, factory=factory, checkpoint=checkpoint, data=data
            ),
            data=context.data,
            inputs=("image",),
            score=lambda out, y: percent(float((out[0].argmax(1) == y).float().mean())),
            score_title="accuracy",
            small_batch=1,
            large_batch=32,
            samples=SAMPLES,
        )
        ours = {"`quantize_static`": _stage(""), "with `equalize`": _stage(", equalize: true")}
        yield contest.table(title, "static", ours, root, given)


def _stage(more: str) -> str:
    gates = "gates: [{gate: max_drop, points: 5}]"
    stage = f"stage: quantize_static, calibration_samples: {SAMPLES}{more}"
    return f"  - {{name: int8, {stage}, {gates}}}\n"
