"""Folders with integers of a few bits in the layout `pack-quantized` of compressed-tensors.

A row's integers follow each other in 32-bit words, the earlier ones in the lower bits, as the bytes
of `quantize_weights` do. Both store an integer plus half its range, so that only the type differs.
Zero points are packed along the outputs.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.artifacts.carried_files import CONFIG
from compress.artifacts.hf_folder import build, reading_by_transformers, refuse_lookups
from compress.artifacts.meta_init import parameters_on_meta, stream_weights_
from compress.artifacts.streaming.packed_model import PackedWeight, packed_module, shared_parameters
from compress.checkpoint.safetensors_io import read_safetensors, write_safetensors
from compress.checkpoint.state_dict import StoredTensor, Weights, in_memory
from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs
from compress.common.tensor_difference import relative_error
from compress.export.common.packed_weights import DecoderWeights, call_by_name

if TYPE_CHECKING:
    from compress.artifacts.streaming.packed_model import PackedModel
    from compress.common.signature import Signature

FILE = "model.safetensors"
JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that vLLM joins to one, which is wholly packed or wholly float."""


def vllm_limits(weights: DecoderWeights, scheme: Mapping[str, Any]) -> Iterator[str]:
    """Yield why vLLM will not open a folder, by the `weights` of its config, and what to change."""
    module, bits = weights.module, scheme["num_bits"]
    if bits == 8 and not scheme["symmetric"]:
        yield (
            "vLLM has no kernel for 8 bits with zero points, but for groups of 64 and 128 on a "
            "Hopper GPU; for vLLM write symmetric: true in quantize_weights"
        )
    joined = next(_partly_packed(weights), None)
    if joined is not None:
        parts, packed = joined
        yield (
            f"vLLM joins {', '.join(parts)} to one layer, and does not open a folder in which only "
            f"{', '.join(packed)} is packed; exclude all of them or none"
        )
    config: Any = module.config
    if type(module).__name__ == "Qwen2ForCausalLM" and (
        (getattr(config, "head_dim", None) or config.hidden_size) * config.num_attention_heads
        < config.hidden_size
    ):
        yield (
            "vLLM's Qwen2 takes the width by the number of heads as their size, and does not open "
            'one with fewer heads; do not prune them (exclude: ["*.self_attn"])'
        )
    head = head_name(module)
    layer = module.get_submodule(head) if head else None
    if (f"{head}.weight", False) in weights.packed and isinstance(layer, nn.Linear):
        per_word = 32 // bits
        if layer.out_features % per_word and not scheme["symmetric"]:
            yield (
                f"vLLM does not open zero points of {head} for {layer.out_features} tokens, which "
                f"{per_word} does not divide; for vLLM exclude {head}, or write symmetric: true"
            )


def _partly_packed(weights: DecoderWeights) -> Iterator[tuple[list[str], list[str]]]:
    for name, parent in weights.module.named_modules():
        for layers in JOINED:
            parts = [f"{name}.{layer}" for layer in layers if hasattr(parent, layer)]
            packed = [part for part in parts if (f"{part}.weight", False) in weights.packed]
            if packed and packed != parts:
                yield parts, packed


ZERO_POINT = "weight_zero_point"
PARTS = ("weight_packed", "weight_scale", ZERO_POINT, "weight_shape")


def state_of(
    weights: DecoderWeights, *, symmetric: bool, tied: bool
) -> dict[str, torch.Tensor | StoredTensor]:
    """Return the tensors of a folder: packed linear layers, and all others as floats.

    They are computed when they are read, so that one of them at a time is in memory. `symmetric`
    leaves out the zero points, which all lie in the middle, and `tied` the last layer's weight,
    which is that of the table.
    """
    module = weights.module
    state: dict[str, torch.Tensor | StoredTensor]
    state = {name: x.detach() for name, x in module.state_dict().items()}

    def dequantized(key: tuple[str, bool]) -> torch.Tensor:
        return weights.packed[key].dequantized()

    def packed(key: tuple[str, bool], part: str) -> torch.Tensor:
        return packed_state(key[0], weights.packed[key])[part].contiguous()

    for key in weights.packed:
        name, is_table = key
        stem = name.removesuffix(".weight")
        layer = module.get_submodule(stem)
        if not is_table and isinstance(layer, nn.Linear):
            state.pop(name)
            for part, tensor in packed_state(name, weights.packed[key]).items():
                if not (symmetric and part == ZERO_POINT):
                    state[f"{stem}.{part}"] = _computed(tensor, partial(packed, key, part))
        elif is_table == isinstance(layer, nn.Embedding):  # a table, or the router of a mixture
            state[name] = _computed(module.get_parameter(name), partial(dequantized, key))
    if tied:
        state.pop(f"{head_name(module)}.weight", None)
    # Tied weights of the module share memory, and each name is stored by itself.
    return {
        name: x if isinstance(x, StoredTensor) else _computed(x, x.clone)
        for name, x in sorted(state.items())
    }


def head_name(module: nn.Module) -> str | None:
    """Return the name of the layer that gives a decoder's scores."""
    head = module.get_output_embeddings()  # type: ignore[operator]
    return next((name for name, layer in module.named_modules() if layer is head), None)


def _computed(like: torch.Tensor, read: Callable[[], torch.Tensor]) -> StoredTensor:
    return StoredTensor(tuple(like.shape), like.dtype, read)


def packed_state(name: str, weight: PackedWeight) -> dict[str, torch.Tensor]:
    """Return a layer's tensors by their names in the format; StageFailed for float zero points."""
    if weight.zero_point.is_floating_point():
        raise StageFailed(
            f"{name} has zero points between two integers, as method hqq fits them, which "
            "compressed-tensors has not; use gptq, awq or rtn"
        )
    outputs, groups = weight.zero_point.shape
    integers_in_word = 32 // weight.bits
    padded = torch.zeros(groups, -(-outputs // integers_in_word) * integers_in_word)
    padded = padded.to(torch.uint8)
    padded[:, :outputs] = weight.zero_point.T
    if weight.bits == 4:
        padded = padded[:, ::2] | (padded[:, 1::2] << 4)
    inputs = weight.packed.shape[1] * 8 // weight.bits
    values = (
        weight.packed.contiguous().view(torch.int32),
        weight.scale,
        padded.contiguous().view(torch.int32).T,
        torch.tensor([outputs, inputs]),
    )
    return dict(zip(PARTS, values, strict=True))


def unpacked(state: Weights, stem: str, bits: int) -> PackedWeight:
    """Return a layer's integers, read from the tensors of a folder."""
    parts = {part: in_memory(state[name]) for part in PARTS if (name := f"{stem}.{part}") in state}
    packed, scale = parts["weight_packed"].view(torch.uint8), parts["weight_scale"]
    if ZERO_POINT not in parts:
        middle = torch.full(scale.shape, 2 ** (bits - 1), dtype=torch.uint8)
        return PackedWeight(packed, scale, middle, bits, is_table=False)
    zeros = parts[ZERO_POINT].T.contiguous().view(torch.uint8)
    if bits == 4:
        zeros = torch.stack((zeros & 15, zeros >> 4), -1).flatten(1)
    outputs = int(parts["weight_shape"][0])
    return PackedWeight(packed, scale, zeros[:, :outputs].T.contiguous(), bits, is_table=False)


def floats_of(stored: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> Weights:
    """Return a folder's weights as floats, still on disk, by the names of the module."""
    bits = int(config["config_groups"]["group_0"]["weights"]["num_bits"])

    def read(stem: str) -> torch.Tensor:
        return unpacked(stored, stem, bits).dequantized()

    floats = {k: x for k, x in stored.items() if k.rpartition(".")[2] not in PARTS}
    for name in stored:
        stem, _, part = name.rpartition(".")
        if part == PARTS[0]:
            outputs, words = stored[name].shape
            shape = (outputs, words * 32 // bits)
            floats[f"{stem}.weight"] = StoredTensor(shape, torch.float32, partial(read, stem))
    return floats


def quantization_config(weights: DecoderWeights) -> dict[str, Any]:
    """Return the entry of `config.json` that says how weights are packed.

    Raise StageFailed where no linear layer is packed, experts are, or layers differ in bits or
    groups.
    """
    if experts := [name for name, _ in weights.packed if not name.endswith(".weight")]:
        raise StageFailed(
            f"{experts[0]} holds experts in few bits, for which compressed-tensors has no layout; "
            'use export_onnx or export_genai, or exclude: ["*.experts"] in quantize_weights'
        )
    linears = [n for n, m in weights.module.named_modules() if isinstance(m, nn.Linear)]
    packed = [n for n in linears if (f"{n}.weight", False) in weights.packed]
    formats, symmetric = set(), True
    for name in packed:  # one after the other, as they may be on disk
        weight = weights.packed[f"{name}.weight", False]
        formats.add((weight.bits, weight.group_size))
        symmetric = symmetric and bool((weight.zero_point == 2 ** (weight.bits - 1)).all())
    if len(formats) != 1:
        found = ", ".join(f"{bits} bits in groups of {size}" for bits, size in sorted(formats))
        raise StageFailed(
            "writes linear layers of one format, as quantize_weights makes them, found "
            f"{found or 'none in few bits'}"
        )
    ((bits, group_size),) = formats
    scheme = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group",
        "group_size": group_size,
        "dynamic": False,
    }
    # vLLM's class of the last layer is no Linear: it is found by its name.
    targets = ["Linear", *(name for name in packed if name == head_name(weights.module))]
    group = {"targets": targets, "weights": scheme, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "ignore": [name for name in linears if name not in packed],
        "kv_cache_scheme": None,
    }


def write_folder(file: Path, weights: DecoderWeights) -> dict[str, Any]:
    """Write a folder's config and tensors; return how the config describes the packed weights."""
    module: Any = weights.module
    config = json.loads(module.config.to_json_string(use_diff=False))
    config["architectures"] = [type(module).__name__]
    config["quantization_config"] = quantization_config(weights)
    scheme: dict[str, Any] = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    if any(name == f"{head_name(module)}.weight" for name, _ in weights.packed):
        config["tie_word_embeddings"] = False  # table and last layer now differ
    (file.parent / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tied = config.get("tie_word_embeddings", False)
    write_safetensors(file, state_of(weights, symmetric=scheme["symmetric"], tied=tied))
    return scheme


def compare_integers(file: Path, weights: DecoderWeights, title: str) -> int:
    """Return how many integers a file has; StageFailed where one differs from the graph's."""
    stored, count = read_safetensors(file), 0
    for name, is_table in weights.packed:
        stem = name.removesuffix(".weight")
        if is_table or f"{stem}.weight_packed" not in stored:
            continue
        weight = weights.packed[name, is_table]
        found = unpacked(stored, stem, weight.bits)
        for part in ("packed", "scale", "zero_point"):
            if not torch.equal(getattr(found, part), getattr(weight, part)):
                raise StageFailed(f"{title}: {name}: {part} differs in the file")
        count += found.integers().numel()
    return count


def scores_error(signature: Signature, folder: Path, weights: DecoderWeights) -> float:
    """Return how far transformers' answers differ from those of the dequantized weights."""
    weights.use_({key: weight.dequantized() for key, weight in weights.packed.items()})
    return weights.scores_error(opened_folder(folder, signature), signature)


def streamed_scores_error(model: PackedModel, folder: Path) -> float:
    """Return how far the file's answers, layer by layer, differ from the model's."""
    inputs = model.signature.example()
    with torch.inference_mode():
        expected = packed_module(model.recipe, model.stored(), rounds=False)(*inputs)
        found = streamed_folder(folder, model.signature)(*inputs)
    return relative_error(flatten_outputs(expected)[0], found[0])


def opened_folder(folder: Path, signature: Signature) -> Any:
    """Return a folder's model as transformers opens it, called with the signature's inputs."""
    import transformers

    with reading_by_transformers(folder), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You passed `quantization_config`")
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        refuse_lookups(config, folder / CONFIG)
        if config["quantization_config"]["quant_method"] != "compressed-tensors":
            raise ValueError(f"{CONFIG} names another quant_method than compressed-tensors")
        kind: Any = getattr(transformers, config["architectures"][0])
        # Kept packed, transformers 5.24 with compressed-tensors 0.20 expects zero points of 4 bits
        # that are not packed, and refuses packed ones, which the format prescribes.
        dense = transformers.CompressedTensorsConfig(dequantize=True)
        module = kind.from_pretrained(
            folder, dtype="float32", local_files_only=True, quantization_config=dense
        ).eval()
    return call_by_name(module, signature)


def streamed_folder(folder: Path, signature: Signature, device: str = "cpu") -> Any:
    """Return a folder's model, which reads and dequantizes a layer's weights when it is called."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    with parameters_on_meta():
        module = build(config["architectures"][0], config).eval()
    stored = read_safetensors(folder / FILE)
    floats = dict(floats_of(stored, config["quantization_config"]))
    for tied, _ in shared_parameters(module):  # such a weight is in the file once
        at = next((name for name in tied if name in floats), None)
        floats |= {name: floats[at] for name in tied if at is not None and name not in floats}
    stream_weights_(module, floats, device)
    return call_by_name(module, signature)
