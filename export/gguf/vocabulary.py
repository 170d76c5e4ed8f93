"""A byte-level tokenizer as a GGUF file holds it: tokens, merges, and how text is first split."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from compress.artifacts.carried_files import TOKENIZER, chat_template_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gguf import GGUFWriter

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    WORDS % r"\p{N}{1,3}": "llama-bpe",
    WORDS % r"\p{N}": "qwen2",
    # ByteLevel's own, where it splits text itself.
    None: "gpt-2",
}
"""Regular expression of a tokenizer → what llama.cpp calls that way to split text."""


def add_vocabulary(writer: GGUFWriter, carried: Mapping[str, bytes], module: Any) -> str:
    """Write the tokenizer among a model's files; return why there is none, or an empty string."""
    from gguf import TokenType

    tokenizer = json.loads(carried[TOKENIZER]) if TOKENIZER in carried else None
    reason = _why_unknown(tokenizer)
    if tokenizer is None or reason:
        writer.add_tokenizer_model("no_vocab")
        return reason
    size = module.config.vocab_size
    # What the model has scores for and the tokenizer no text.
    tokens = [f"[PAD{i}]" for i in range(size)]
    kinds = [TokenType.UNUSED] * size
    known = [(i, token, TokenType.NORMAL) for token, i in tokenizer["model"]["vocab"].items()]
    for added in tokenizer["added_tokens"]:
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        known.append((added["id"], added["content"], kind))
    for i, token, kind in known:
        if i < size:  # tokenizers of transformers may add tokens that a model has no scores for
            tokens[i], kinds[i] = token, kind
    merges = (m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(SPLITS[_split_of(tokenizer["pre_tokenizer"])])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([*merges])
    _add_special_tokens(writer, carried[TOKENIZER], module)
    template = chat_template_of(carried)
    if template is not None:
        writer.add_chat_template(template)
    return ""


def _why_unknown(tokenizer: Any) -> str:
    """Return why llama.cpp cannot split text as a tokenizer does; empty where it can."""
    if tokenizer is None:
        return f"the model has no {TOKENIZER}"
    kind = tokenizer["model"]["type"]
    if kind != "BPE" or tokenizer["model"].get("byte_fallback"):
        return f"its tokenizer is of type {kind}, expected byte-level BPE"
    if not tokenizer["model"]["merges"]:
        return "its tokenizer has no merges, without which llama.cpp opens no file"
    if tokenizer.get("normalizer") not in (None, {"type": "NFC"}):
        return f"its tokenizer normalizes text by {tokenizer['normalizer']['type']}"
    split = _split_of(tokenizer.get("pre_tokenizer"))
    return "" if split in SPLITS else f"its tokenizer splits text by {split}"


def _split_of(pre_tokenizer: Any) -> str | None:
    """Return the regular expression that text is split by; None for that of `ByteLevel`."""
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {"type": "nothing"}]
    *others, last = steps
    if last["type"] != "ByteLevel" or last.get("add_prefix_space"):
        return json.dumps(last)
    if not others and last.get("use_regex", True):
        return None
    pattern = others[0].get("pattern", {}).get("Regex") if len(others) == 1 else None
    return str(pattern or json.dumps(others))


def _add_special_tokens(writer: GGUFWriter, content: bytes, module: Any) -> None:
    """Write which tokens begin, end and pad a text, and whether a prompt gets them."""
    from tokenizers import Tokenizer

    begin, end, pad = (
        getattr(module.config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")
    )
    end = end[0] if isinstance(end, list) else end
    encoded = Tokenizer.from_str(content.decode()).encode("a").ids
    if begin is not None:
        writer.add_bos_token_id(begin)
    if end is not None:
        writer.add_eos_token_id(end)
    if pad is not None:
        writer.add_pad_token_id(pad)
    writer.add_add_bos_token(begin is not None and encoded[:1] == [begin])
    writer.add_add_eos_token(end is not None and encoded[-1:] == [end])
