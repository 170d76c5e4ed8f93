"""Writes a GGUF file and reads it back: its tensors' names, and the rows that llama.cpp expects."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from compress.artifacts.carried_files import TOKENIZER, chat_template_of
from compress.artifacts.hf_folder import reading_by_transformers
from compress.common.errors import StageFailed
from compress.export.common.packed_weights import DecoderWeights, call_by_name
from compress.export.exporter import refuse_scores

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from numpy.typing import NDArray

    from compress.artifacts.streaming.packed_model import PackedWeight
    from compress.common.signature import Signature

logger = logging.getLogger(__name__)
BLOCK = 32
BlockType = Literal["Q8_0", "Q4_0", "Q4_1"]
HEADER = {"Q8_0": 2, "Q4_0": 2, "Q4_1": 4}  # bytes of a block before its integers


def block_type(weight: PackedWeight) -> BlockType | None:
    """Return the type of blocks that holds a weight's integers; None where GGUF has none."""
    if weight.group_size % BLOCK:
        return None
    if bool((weight.zero_point == 2 ** (weight.bits - 1)).all()):
        return "Q8_0" if weight.bits == 8 else "Q4_0"
    return "Q4_1" if weight.bits == 4 else None


def blocks_of(name: str, weight: PackedWeight) -> NDArray[np.uint8]:
    """Return a weight's blocks, `(outputs, row bytes)`; StageFailed where GGUF has none such."""
    kind = block_type(weight)
    if kind is None:
        if weight.group_size % BLOCK:
            raise StageFailed(
                f"{name}: GGUF shares scales by {BLOCK} numbers, found {weight.group_size}; set "
                "group_size"
            )
        raise StageFailed(
            f"{name}: GGUF has no type of 8 bits with zero points; set symmetric: true in "
            "quantize_weights, or bits: 4"
        )
    outputs, groups = weight.scale.shape
    per_group = weight.group_size // BLOCK
    with np.errstate(over="ignore"):
        scale = weight.scale.repeat_interleave(per_group, 1).numpy()[..., None]
        smallest = -weight.zero_point.float() * weight.scale
        smallest_half = smallest.repeat_interleave(per_group, 1).numpy()[..., None]
        headers = [scale.astype("<f2")]
        if kind == "Q4_1":
            headers.append(smallest_half.astype("<f2"))
    if not all(np.isfinite(header).all() for header in headers):
        raise StageFailed(f"{name}: a scale of {weight.scale.max():.3g} is beyond half precision")
    integers = weight.integers().numpy().reshape(outputs, groups * per_group, BLOCK)
    if kind == "Q8_0":
        packed = (integers.astype(np.int16) - 128).astype(np.int8).view(np.uint8)
    else:
        packed = integers[..., : BLOCK // 2] | (integers[..., BLOCK // 2 :] << 4)
    blocks = [*(header.view(np.uint8) for header in headers), packed]
    return np.concatenate(blocks, axis=-1).reshape(outputs, -1)


def integers_of(blocks: NDArray[np.uint8], kind: BlockType) -> NDArray[np.uint8]:
    """Return the integers of a tensor's blocks, `(outputs, inputs)`, as `PackedWeight` has them."""
    header = HEADER[kind]
    rows = blocks.reshape(len(blocks), -1, header + (BLOCK if kind == "Q8_0" else BLOCK // 2))
    packed = rows[..., header:]
    if kind == "Q8_0":
        integers = (packed.view(np.int8).astype(np.int16) + 128).astype(np.uint8)
    else:
        integers = np.concatenate((packed & 15, packed >> 4), axis=-1)
    return integers.reshape(len(blocks), -1)


def check_family(config: Any, title: str) -> None:
    """Raise StageFailed for models that llama.cpp would compute otherwise than transformers."""
    if config.model_type not in FAMILIES:
        raise StageFailed(
            f"{title}: takes decoders of the families {', '.join(FAMILIES)}, found "
            f"{config.model_type}; export_genai and export_compressed_tensors take others"
        )
    rotary = config.rope_parameters["rope_type"]
    if rotary != "default":
        raise StageFailed(
            f"{title}: takes rotary embeddings of type default, found {rotary} (rope_parameters)"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise StageFailed(
            f"{title}: takes attention to the whole text, found sliding_window {window} in a "
            f"context of {config.max_position_embeddings} tokens"
        )
    if config.hidden_act != "silu":
        raise StageFailed(f"{title}: takes hidden_act silu, found {config.hidden_act}")
    heads, size = config.num_attention_heads, _head_size(config)
    if config.model_type == "qwen2" and heads * size != config.hidden_size:
        raise StageFailed(
            f"{title}: llama.cpp takes a Qwen2 whose heads have hidden_size ({config.hidden_size}) "
            f"numbers together, found {heads} heads of {size}; exclude its heads in "
            "prune_channels, or use export_genai or export_compressed_tensors"
        )


def _head_size(config: Any) -> int:
    stated: int | None = getattr(config, "head_dim", None)
    return stated or int(config.hidden_size // config.num_attention_heads)


def add_settings(writer: GGUFWriter, config: Any, name: str) -> None:
    """Write a config's sizes."""
    writer.add_name(name)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head = _head_size(config)
    writer.add_rope_dimension_count(head)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


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
    from tokenizers import Tokenizer

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
    begin, end, pad = (
        getattr(module.config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")
    )
    end = end[0] if isinstance(end, list) else end
    # Whether a prompt gets them, too.
    encoded = Tokenizer.from_str(carried[TOKENIZER].decode()).encode("a").ids
    for name, token in (("bos", begin), ("eos", end), ("pad", pad)):
        if token is not None:
            getattr(writer, f"add_{name}_token_id")(token)
    writer.add_add_bos_token(begin is not None and encoded[:1] == [begin])
    writer.add_add_eos_token(end is not None and encoded[-1:] == [end])
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


class Family(NamedTuple):
    """How llama.cpp computes the models of a `model_type` of transformers."""

    architecture: str
    interleaves_rotary: bool
    """Whether pairs of rotated numbers lie beside each other there, and half a head apart here."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", True),
    "mistral": Family("llama", True),
    "qwen2": Family("qwen2", False),
    "qwen3": Family("qwen3", False),
}


class FileTensor(NamedTuple):
    """A tensor of the file."""

    name: str
    source: str
    values: torch.Tensor | PackedWeight
    row_order: torch.Tensor | None
    """Which of the parameter's rows each of its rows is, where the order is another."""


def file_tensors(weights: DecoderWeights) -> Iterator[FileTensor]:
    """Yield the tensors of a decoder's file, whose names GGUF's own table gives.

    A weight that is tied in the model, but was packed otherwise as a table than as a layer, is
    written twice.
    """
    from gguf import MODEL_ARCH, get_tensor_name_map

    module: Any = weights.module
    config = module.config
    family = FAMILIES[config.model_type]
    names = get_tensor_name_map(MODEL_ARCH[family.architecture.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tied = config.tie_word_embeddings and ("lm_head.weight", False) not in weights.packed
    tables = {n for n, layer in module.named_modules() if isinstance(layer, torch.nn.Embedding)}
    for source, parameter in module.named_parameters(remove_duplicate=False):
        stem, _, kind = source.rpartition(".")
        if tied and stem == "lm_head":
            continue  # llama.cpp reads the table of embeddings instead
        order = None
        layer = stem.rpartition(".")[2]
        if family.interleaves_rotary and layer in heads:
            halves = torch.arange(len(parameter)).view(heads[layer], 2, -1)
            order = halves.transpose(1, 2).flatten()
        values: Any = weights.packed.get((source, stem in tables), parameter.detach())
        yield FileTensor(f"{names.get_name(stem)}.{kind}", source, values, order)


def write_file(
    file: Path, weights: DecoderWeights, carried: Mapping[str, bytes], title: str
) -> None:
    """Write a decoder's settings, tokenizer and tensors."""
    from gguf import GGMLQuantizationType, GGUFWriter

    module: Any = weights.module
    writer = GGUFWriter(file, FAMILIES[module.config.model_type].architecture)
    add_settings(writer, module.config, type(module).__name__)
    if reason := add_vocabulary(writer, carried, module):
        logger.warning("%s: the file reads and writes token ids alone: %s", title, reason)
    for name, source, values, row_order in file_tensors(weights):
        if isinstance(values, torch.Tensor):
            rows = values.float().numpy()
            writer.add_tensor(name, rows if row_order is None else rows[row_order])
        elif values.is_table and block_type(values) is None:
            writer.add_tensor(name, values.dequantized().numpy().astype(np.float16))
        else:
            kind = GGMLQuantizationType[block_type(values) or "F32"]
            blocks = blocks_of(source, values)
            blocks = blocks if row_order is None else blocks[row_order]
            writer.add_tensor(name, np.ascontiguousarray(blocks), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compare_file(
    file: Path, signature: Signature, weights: DecoderWeights, title: str
) -> dict[str, Any]:
    """Compare a file's weights and answers with its source's; return what was found.

    Raise StageFailed where they differ by more than the rounding of scales to half precision.
    """
    from gguf import GGUFReader, dequantize

    stored = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    floats, count = dict[tuple[str, bool], torch.Tensor](), 0
    for name, source, values, row_order in file_tensors(weights):
        found = stored[name]
        rows = torch.tensor(dequantize(found.data, found.tensor_type))
        order = torch.arange(len(rows)) if row_order is None else row_order
        rows = torch.empty_like(rows).index_copy_(0, order, rows)
        if isinstance(values, torch.Tensor):
            if not torch.equal(rows, values.float()):
                raise StageFailed(f"{title}: {source} differs in the file")
            continue
        kind = block_type(values)
        if kind is not None:
            integers = torch.tensor(integers_of(found.data, kind))
            if not torch.equal(integers, values.integers()[order]):
                raise StageFailed(f"{title}: {source}: integers differ in the file")
            count += integers.numel()
        # d and m have 11 bits each; beyond the smallest normal half they are coarser.
        largest = values.scale.amax() * 2**values.bits
        if not (rows - values.dequantized()).abs().max() <= 2**-10 * largest:
            raise StageFailed(f"{title}: {source}: scales differ in the file")
        floats[source, values.is_table] = rows
    weights.use_(floats)
    error = weights.scores_error(opened_file(file, signature), signature)
    wrong = f"{title}: transformers answers otherwise than the file's weights"
    return {
        "equal_integers": count,
        "scores_error": refuse_scores(error, wrong),
        "opened_by": f"gguf {version('gguf')} and transformers {version('transformers')}",
    }


def opened_file(file: Path, signature: Signature) -> Any:
    """Return a file's model as transformers opens it, called with the signature's inputs."""
    import transformers
    from gguf import GGUFReader

    # transformers 5.24 shows a progress bar here that its own setting does not hide.
    with reading_by_transformers(file), contextlib.redirect_stderr(io.StringIO()):
        where = {"gguf_file": file.name, "local_files_only": True}
        config = transformers.AutoConfig.from_pretrained(file.parent, **where)
        # transformers 5.24 does not read it for all families, and takes 128 for Qwen3.
        fields = GGUFReader(file).fields
        (length,) = (name for name in fields if name.endswith(".attention.key_length"))
        config.head_dim = fields[length].contents()
        kind: Any = transformers.AutoModelForCausalLM
        module = kind.from_pretrained(file.parent, config=config, dtype="float32", **where).eval()
    return call_by_name(module, signature)
