"""What vLLM answers with folders of `export_compressed_tensors`, and how fast it generates."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from compress import PruneChannels, QuantizeWeights
from compress.artifacts.hf_folder import offline_transformers
from compress.artifacts.libraries.transformers_folder import write_transformers_folder
from compress.common.tensor_difference import relative_error
from compress.data.splits import Splits
from compress.export import ExportCompressedTensors, ExportGenai
from compress.export.genai.runtime import measure_speed
from decoder.compression import PROMPT, TOKENS, context_for, made_once, trained
from decoder.in_vllm.client import vllm
from decoder.peers import ALIKE, OURS, python_of
from decoder.text import VOCABULARY, splits
from tests.export import tiny_decoder

if TYPE_CHECKING:
    from compress import Artifact, Context, EagerModel

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": 8},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Phi": {"num_key_value_heads": 4, "intermediate_size": 512},
    "Phi3": {"pad_token_id": 0},
    "Gemma": {"head_dim": 32},
    "Granite": {},
    "StableLm": {},
    "OPT": {"ffn_dim": 256, "word_embed_proj_dim": 128},
}
PRUNED = ("Llama", "Mistral", "Qwen3", "Phi3", "Gemma", "Granite")
"""Families that are also opened with half the heads and inner width."""
WHOLE_HEAD = {"exclude": ("lm_head",), "embeddings": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "zero points": WHOLE_HEAD,
    "symmetric": {"symmetric": True, **WHOLE_HEAD},
    "zero points, groups of 128": {"group_size": 128, **WHOLE_HEAD},
    "head in 4 bits": {},
    "8 bits, symmetric": {"bits": 8, "symmetric": True, **WHOLE_HEAD},
}
IDS = [256, 51, 71, 68, 220, 86, 72, 83, 71, 220, 82, 83]
ROUNDS = 5
MOST_SCORES = 2**22
"""vLLM makes an object of each."""
DTYPE = "float16"
"""Nearest to the stage's float32 of what vLLM's 4-bit kernel multiplies."""


def families(python: Path) -> None:
    """Print how far vLLM's scores are from the quantized model's, for tiny random decoders."""
    print("| family | 4 bits | difference of scores | equal next tokens |\n|---|---|---|---|")
    with TemporaryDirectory() as name, offline_transformers("the benchmark"), ExitStack() as stack:
        root = Path(name)
        opened = stack.enter_context(vllm(python, DTYPE, log=root / "log"))

        def rows(family: str, source: EagerModel, settings: list[str]) -> None:
            for kind in settings:
                folder = root / f"{family}-{kind}"
                stage = QuantizeWeights(activation_bits=32, **SETTINGS[kind])
                model = stage(source, tiny_decoder.context_for(source, folder / "packed"))
                context = tiny_decoder.context_for(source, folder / "folder")
                made = ExportCompressedTensors()(model, context)
                expected = model.open()(torch.tensor([IDS]))[0][0]
                refused = opened.ask(open=str(made.path)).get("refused")
                if refused:
                    reason = " ".join(refused.split())[:120]
                    print(f"| {family} | {kind} | refused: {reason} | |", flush=True)
                    continue
                found = opened.scores(IDS, root / "scores")[:, : expected.shape[-1]]
                equal = int((found.argmax(-1) == expected.argmax(-1)).sum())
                error = relative_error(expected, found)
                print(f"| {family} | {kind} | {error:.1e} | {equal} of {len(IDS)} |", flush=True)

        for family, sizes in FAMILIES.items():
            folder = root / family
            sizes = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 288, **sizes}
            source = tiny_decoder.decoder(folder, family, **sizes)
            rows(family, source, [*SETTINGS] if family == "Llama" else ["zero points", "symmetric"])
            if family in PRUNED:
                prune = PruneChannels(ratio=0.5, calibration_samples=0)
                narrow = prune(source, tiny_decoder.context_for(source, folder / "pruned"))
                rows(f"{family}, pruned", narrow, ["zero points", "symmetric"])


def _folders(
    folder: Path, source: EagerModel, context: Context
) -> dict[str, tuple[Artifact, Path]]:
    """Return the model in 4 bits by GPTQ, with its folder for vLLM."""
    found = {}
    for name in ("GPTQ, zero points", "GPTQ, symmetric"):
        root = folder / f"peers-{name.replace(', ', '-').replace(' ', '-')}"
        stage = QuantizeWeights(bits=4, calibration_samples=24, **ALIKE, **OURS[name])
        model = made_once(root, partial(stage, source, context.with_root(root)))
        to = folder / f"vllm-{root.name}"
        made = made_once(to, partial(ExportCompressedTensors(), model, context.with_root(to)))
        found[name] = (model, made.path)
    return found


def trained_model(folder: Path, python: Path, source: EagerModel, context: Context) -> None:
    """Print perplexity and KL divergence of vLLM's answers on texts of `val`, to ours."""
    assert context.data is not None
    data: Any = context.data.datasets["val"]
    module: Any = source.load()
    vocabulary = module.get_input_embeddings().num_embeddings
    texts = [data[i]["input_ids"][: min(256, MOST_SCORES // vocabulary)] for i in range(2)]
    print("\n| GPTQ, groups of 32 | perplexity, ours | in vLLM | KL, nats | equal next tokens |")
    print("|---|---|---|---|---|")
    with vllm(python, "bfloat16", log=folder / "vllm.log") as opened:
        for name, (model, path) in _folders(folder, source, context).items():
            refused = opened.ask(open=str(path)).get("refused")
            if refused:
                raise SystemExit(f"{path}: {refused}")
            losses, divergences, equal = [], [], 0
            for text in texts:
                ours = model.open()(text[None])[0][0]
                theirs = opened.scores(text.tolist(), folder / "vllm-scores")[:, : ours.shape[-1]]
                p, q = ours.log_softmax(-1), theirs.log_softmax(-1)
                divergences.append((p.exp() * (p - q)).sum(-1))
                next_tokens = text[1:, None]
                losses.append([-x[:-1].gather(-1, next_tokens).mean() for x in (p, q)])
                equal += int((p.argmax(-1) == q.argmax(-1)).sum())
            before, after = torch.tensor(losses).mean(0).exp().tolist()
            divergence = torch.cat(divergences).mean().item()
            of = sum(len(text) for text in texts)
            row = f"{before:.3f} | {after:.3f} | {divergence:.2g} | {equal} of {of}"
            print(f"| {name} | {row} |", flush=True)


def speed(folder: Path, python: Path, source: EagerModel, context: Context) -> None:
    """Print the speed of vLLM beside folders of `export_genai`, in turn, one thread each."""
    if not (folder / "hf" / "config.json").exists():
        write_transformers_folder(source.path, folder / "hf")
    packed = _folders(folder, source, context)
    rounds: dict[str, list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        processes = {}
        theirs = {
            "vLLM, float32": (folder / "hf", "float32"),
            "vLLM, bfloat16": (folder / "hf", "bfloat16"),
            "vLLM, zero points, bfloat16": (packed["GPTQ, zero points"][1], "bfloat16"),
        }
        for number, (name, (path, dtype)) in enumerate(theirs.items()):
            log = folder / f"vllm-{number}.log"
            process = stack.enter_context(vllm(python, dtype, "--compile", log=log))
            refused = process.ask(open=str(path)).get("refused")
            if refused:
                raise SystemExit(f"{path}: {refused}")
            processes[name] = process
        ours = {"`export_genai`, float32": folder / "peers-genai-float32"}
        if not ours["`export_genai`, float32"].exists():
            ExportGenai()(source, context.with_root(ours["`export_genai`, float32"]))
        ours["`export_genai`, zero points"] = folder / "peers-genai-zero-points" / "genai"
        for turn in range(ROUNDS):
            for name, path in ours.items():
                found = measure_speed(path, VOCABULARY, PROMPT, TOKENS, 1)
                rounds.setdefault(name, []).append((*found,))
            for name, process in processes.items():
                for warm in (True, False):
                    drawn = np.random.default_rng(2 * turn + warm)
                    prompt = drawn.integers(0, VOCABULARY, PROMPT).tolist()
                    found = process.ask(speed=prompt, count=TOKENS)
                rounds.setdefault(name, []).append((*found,))
    print("\n| folder | first token, ms | tokens/s |\n|---|---|---|")
    for name, pairs in rounds.items():
        first, rate = (median(values) for values in zip(*pairs, strict=True))
        print(f"| {name} | {first:.1f} | {rate:.0f} |", flush=True)


def main(folder: Path, environments: Path, *, speed_alone: bool) -> None:
    """Print all tables, or that of the speed alone."""
    python = python_of(environments, "vllm")
    if python is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    data = Splits(splits(folder), batch_size=4)
    source = trained(folder, data)
    context = context_for(folder / "any", data, source=source)
    if not speed_alone:
        families(python)
        trained_model(folder, python, source, context)
    speed(folder, python, source, context)
