"""Quantizes a decoder with one peer, in its environment: `PEER FOLDER TOKENS OUTPUT`.

FOLDER is a Hugging Face folder, TOKENS a safetensors file with `tokens`, calibration texts of one
length. OUTPUT gets the weights as the floats that their integers stand for, by the names in FOLDER;
linear layers but the head get 4 bits in groups of 32, tables none. For a peer of `FOLDERS`, OUTPUT
becomes a folder for onnxruntime-genai, whose head has 4 bits too.
"""

import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def float_model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def llm_compressor(
    folder: Path, tokens: torch.Tensor, *, symmetric: bool
) -> dict[str, torch.Tensor]:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier

    texts = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in tokens.tolist()]
    weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group"}
    scheme = {"targets": ["Linear"], "weights": weights | {"group_size": 32}}
    recipe = GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"])
    model = float_model(folder)
    oneshot(
        model=model,
        dataset=Dataset.from_list(texts),
        recipe=recipe,
        max_seq_length=tokens.shape[1],
        num_calibration_samples=len(tokens),
    )
    return model.state_dict()


def torchao(
    folder: Path, _tokens: torch.Tensor, *, hqq: bool, symmetric: bool
) -> dict[str, torch.Tensor]:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import IntxWeightOnlyConfig, MappingType, PerGroup, quantize_

    if hqq and not symmetric:  # torchao's only HQQ with zero points that runs on a CPU
        config = PrototypeInt4WeightOnlyConfig(group_size=32, int4_choose_qparams_algorithm="hqq")
    else:
        config = IntxWeightOnlyConfig(
            weight_dtype=torch.int4,
            granularity=PerGroup(32),
            mapping_type=MappingType.SYMMETRIC if symmetric else MappingType.ASYMMETRIC,
            intx_choose_qparams_algorithm="hqq_scale_only" if hqq else "affine",
        )
    model = float_model(folder)
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and layer is not model.get_output_embeddings()
    }
    quantize_(model, config, lambda _layer, name: name in layers)
    linear = torch.nn.functional.linear  # of the identity: a packed weight has no `dequantize`
    return {
        f"{name}.weight": linear(torch.eye(layer.in_features), layer.weight).T
        for name, layer in layers.items()
    }


def run_olive(
    folder: Path, tokens: torch.Tensor, output: Path, passes: dict[str, dict[str, Any]]
) -> None:
    """Run passes of Olive on a CPU; their data is named `calibration`."""
    from olive.data.registry import Registry
    from olive.workflows import run

    @Registry.register_dataset("calibration_texts")
    def calibration_texts(**_: Any) -> list[tuple[dict[str, torch.Tensor], int]]:
        return [({"input_ids": row, "attention_mask": torch.ones_like(row)}, 0) for row in tokens]

    processor = {"device": "cpu", "execution_providers": ["CPUExecutionProvider"]}
    texts = {"name": "calibration", "load_dataset_config": {"type": "calibration_texts"}}
    with TemporaryDirectory() as cache:
        done = run(
            {
                "input_model": {"type": "HfModel", "model_path": str(folder)},
                "data_configs": [texts],
                "systems": {"cpu": {"type": "LocalSystem", "accelerators": [processor]}},
                "host": "cpu",
                "target": "cpu",
                "passes": passes,
                "output_dir": str(output),
                "cache_dir": cache,
                "no_artifacts": True,
            }
        )
    if not done.has_output_model():  # Olive logs the error of a pass, and goes on
        raise SystemExit(f"Olive has not written a model to {output}")


def olive(
    folder: Path, tokens: torch.Tensor, *, settings: dict[str, Any]
) -> dict[str, torch.Tensor]:
    from olive.common.quant.nn import QuantLinear
    from olive.model import HfModelHandler

    with TemporaryDirectory() as output:
        run_olive(folder, tokens, Path(output), {"quantize": settings})
        model = HfModelHandler(str(Path(output) / "model")).load_model()
    return {
        f"{name}.weight": layer.unpack_and_dequantize(layer.qweight, layer.scales, layer.qzeros)
        for name, layer in model.named_modules()
        if isinstance(layer, QuantLinear)
    }


def olive_genai(
    folder: Path, tokens: torch.Tensor, output: Path, *, settings: dict[str, Any]
) -> None:
    build = {"type": "ModelBuilder", "precision": "int4"}
    build |= {"int4_block_size": 32, "int4_accuracy_level": 4}
    passes = {"quantize": settings | {"lm_head": True}, "build": build}
    run_olive(folder, tokens, output, passes)


OLIVE_GPTQ = {"type": "Gptq", "bits": 4, "group_size": 32, "data_config": "calibration"}
OLIVE_KQUANT = {"type": "KQuant", "bits": 4, "group_size": 32}
WEIGHTS = {
    "llm_compressor": partial(llm_compressor, symmetric=False),
    "llm_compressor_symmetric": partial(llm_compressor, symmetric=True),
    "torchao_rtn": partial(torchao, hqq=False, symmetric=False),
    "torchao_rtn_symmetric": partial(torchao, hqq=False, symmetric=True),
    "torchao_hqq": partial(torchao, hqq=True, symmetric=False),
    "torchao_hqq_symmetric": partial(torchao, hqq=True, symmetric=True),
    "olive_gptq": partial(olive, settings=OLIVE_GPTQ | {"sym": False}),
    "olive_gptq_symmetric": partial(olive, settings=OLIVE_GPTQ | {"sym": True}),
    "olive_kquant": partial(olive, settings=OLIVE_KQUANT | {"sym": False}),
    "olive_kquant_symmetric": partial(olive, settings=OLIVE_KQUANT | {"sym": True}),
}
"""PEER → what returns weights by name, those that it changes at least."""
FOLDERS = {
    "olive_genai": partial(olive_genai, settings=OLIVE_GPTQ | {"sym": False}),
    "olive_genai_symmetric": partial(olive_genai, settings=OLIVE_GPTQ | {"sym": True}),
}
"""PEER → what writes a folder for onnxruntime-genai."""


def main() -> None:
    peer, *paths = sys.argv[1:]
    folder, tokens, output = map(Path, paths)
    texts = load_file(tokens)["tokens"]
    if peer in FOLDERS:
        FOLDERS[peer](folder, texts, output)
        return
    made = WEIGHTS[peer](folder, texts)
    state = float_model(folder).state_dict()
    contiguous = torch.contiguous_format  # a copy of each, as tied weights share their memory
    save_file({n: made.get(n, state[n]).clone(memory_format=contiguous) for n in state}, output)


if __name__ == "__main__":
    main()
