"""A tiny Llama with random weights, from a Hugging Face folder with a byte-level tokenizer."""

from collections.abc import Sequence
from pathlib import Path

import torch

from compress import Context, EagerModel
from compress.artifacts.artifact import Artifact
from compress.artifacts.hf_folder import files_to_carry, read_folder
from compress.artifacts.importing import import_module
from compress.common.signature import AxisBounds, OutputSpec, Signature, TensorSpec
from compress.core.metrics import Metric
from compress.core.objectives.loss import Loss
from compress.core.objectives.task import TASKS
from compress.data.splits import Splits

VOCABULARY, LONGEST = 257, 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
TOKENS = Signature(
    inputs=(TensorSpec(name="input_ids", shape=("batch", "length"), dtype="int64"),),
    outputs=(OutputSpec(name="logits"),),
    axes={"length": AxisBounds(max=LONGEST)},
)


def save_tokenizer(
    folder: Path, merges: Sequence[tuple[str, str]] = (), chat_template: str | None = None
) -> None:
    """Write a tokenizer whose tokens are the bytes, one that ends a text, and merged pairs."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {letter: i for i, letter in enumerate(alphabet)}
    # After the bytes and the end.
    tokens |= {first + second: VOCABULARY + i for i, (first, second) in enumerate(merges)}
    if merges:
        tokens["<|end|>"] = VOCABULARY - 1
    made = Tokenizer(models.BPE(tokens, [*merges]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|end|>", chat_template=chat_template
    ).save_pretrained(folder)


def decoder(
    folder: Path,
    kind: str = "Llama",
    merges: Sequence[tuple[str, str]] = (),
    chat_template: str | None = None,
    scale: float = 3,
    **sizes: object,
) -> EagerModel:
    """Return the artifact of a decoder with random weights, `scale` times as large as usual.

    At the default width all scores are near ties without that.
    """
    import transformers

    torch.manual_seed(0)
    vocabulary = {"vocab_size": VOCABULARY + len(merges)}
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **vocabulary, **sizes})
    name = next(n for n in (f"{kind}ForCausalLM", f"{kind}LMHeadModel") if hasattr(transformers, n))
    module = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(scale if parameter.dim() > 1 else 1)
    module.save_pretrained(folder / "hf")
    save_tokenizer(folder / "hf", merges, chat_template)
    recipe, module = read_folder(folder / "hf", None, untrained_head=False)
    carried = files_to_carry(folder / "hf", module)
    return import_module(folder / "source", recipe, module, TOKENS, carried=carried)


def texts() -> Splits:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (6, 40), generator=generator)
    rows = [{"input_ids": x, "labels": x} for x in ids]
    return Splits({"train": rows, "val": rows[:3]}, batch_size=3)


def context_for(source: Artifact, root: Path) -> Context:
    language = Loss(task=TASKS["causal-lm"])
    known = {"source": source}
    metric = Metric("perplexity")
    return Context(root=root, data=texts(), loss=language, metric=metric, artifacts=known)
