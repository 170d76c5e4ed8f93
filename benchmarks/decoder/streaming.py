"""Memory and time of a decoder of 1.01 billion weights whose weights stay on disk."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress import Artifact, Context, EagerModel, Metric, QuantizeWeights
from compress.artifacts.importing import import_streamed
from compress.artifacts.meta_init import parameters_on_meta
from compress.checkpoint.safetensors_io import write_safetensors
from compress.checkpoint.state_dict import StoredTensor
from compress.common.signature import AxisBounds, OutputSpec, Signature, TensorSpec
from compress.core.objectives.loss import Loss
from compress.core.objectives.task import TASKS
from compress.data.splits import Splits
from compress.export import ExportCompressedTensors

if TYPE_CHECKING:
    from torch import nn

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 80,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
SAMPLES, LENGTH, JUDGED = 8, 256, 2
"""Texts of the calibration sample, their tokens, and texts whose perplexity is measured."""
STEPS = ("import", "quantize", "export", "perplexity")
TOKENS = Signature(
    inputs=(TensorSpec(name="input_ids", shape=("batch", "length"), dtype="int64"),),
    outputs=(OutputSpec(name="logits"),),
    axes={"length": AxisBounds(max=SIZES["max_position_embeddings"])},
)


def write_random_folder(folder: Path) -> None:
    """Write a folder of transformers with random bfloat16 weights, a tensor at a time."""
    import transformers

    config = transformers.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    state = {
        name: StoredTensor(tuple(parameter.shape), torch.bfloat16, _drawn(number, parameter))
        for number, (name, parameter) in enumerate(_skeleton().named_parameters())
    }
    write_safetensors(folder / "model.safetensors", state)


def _drawn(seed: int, parameter: nn.Parameter) -> Any:
    def draw() -> torch.Tensor:
        if parameter.dim() == 1:
            return torch.ones(parameter.shape, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(parameter.shape, generator=generator).mul_(0.02).to(torch.bfloat16)

    return draw


def _skeleton() -> Any:
    import transformers

    with parameters_on_meta():
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def run_step(step: str, folder: Path, method: str) -> None:
    """Run a step in this process, and print its seconds and its peak of resident memory."""
    torch.set_num_threads(1)
    drawn = torch.Generator().manual_seed(0)
    texts = torch.randint(0, SIZES["vocab_size"], (SAMPLES, LENGTH), generator=drawn)
    rows = [{"input_ids": x, "labels": x} for x in texts]
    data = Splits({"train": rows, "val": rows[:JUDGED]}, batch_size=1)
    context = Context(
        root=folder / "source",
        data=data,
        loss=Loss(task=TASKS["causal-lm"]),
        metric=Metric("perplexity"),
    )
    began, note = time.monotonic(), ""
    if step == "import":
        import_streamed(context.root, folder / "model", None, TOKENS)
    else:
        source = EagerModel.from_directory(folder / "source")
        context = Context(**{**vars(context), "artifacts": {"source": source}})
        quantize = QuantizeWeights(method=method, activation_bits=32)
        if step == "quantize":
            made = quantize(source, context.with_root(folder / method))
            note = f"{made.payload_bytes / 1e6:.0f} MB"
        elif step == "export":
            model: Any = Artifact.from_directory(folder / method)
            made = ExportCompressedTensors()(model, context.with_root(folder / f"{method}-tensors"))
            note = f"{made.manifest.facts['equal_integers']:,} integers read back"
        else:
            scored = [Artifact.from_directory(folder / name) for name in ("source", method)]
            note = " → ".join(f"{context.score(model):.1f}" for model in scored)
    seconds = time.monotonic() - began
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    print(f"| {step} | {peak:.0f} | {seconds:.0f} | {note} |", flush=True)


def main(folder: Path, arguments: list[str]) -> None:
    """Print a table of the steps, each run in a process of its own."""
    method = "gptq" if "--gptq" in arguments else "rtn"
    step = next((a.removeprefix("--step=") for a in arguments if a.startswith("--step=")), "")
    if step:
        run_step(step, folder, method)
        return
    if not (folder / "model" / "model.safetensors").exists():
        write_random_folder(folder / "model")
    parameters = dict(_skeleton().named_parameters())
    block = sum(p.numel() for name, p in parameters.items() if name.startswith("model.layers.0."))
    largest = max(block, max(p.numel() for p in parameters.values())) * 4 / 2**20
    count = sum(p.numel() for p in parameters.values())
    print(
        f"{count:,} weights in {SIZES['num_hidden_layers']} "
        f"blocks of {block * 4 / 2**20:.0f} MiB in float32; the largest part has "
        f"{largest:.0f} MiB; 1.5 × a block + 1 GiB are {1.5 * block * 4 / 2**20 + 1024:.0f} MiB\n"
    )
    print(f"| {method} | peak resident MiB | s | |\n|---|---|---|---|", flush=True)
    for name in STEPS:
        if name == "import" and (folder / "source" / "manifest.json").exists():
            continue
        options = ["--stream", str(folder), f"--step={name}", f"--{method}"]
        subprocess.run([sys.executable, sys.argv[0], *options], check=True, timeout=7200)
