"""Architectures of transformers, built from small configs with the structure of real ones."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from compress.common.signature import Signature, TensorSpec
from tests.compress.pruning.zoo.registry import Case

ENCODER = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
}
WORDS = {"vocab_size": 96, "max_position_embeddings": 64}
SPECIAL = {"use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {**ENCODER, **WORDS}
DECODER = {**TEXT, **SPECIAL}
GROUPED = {**DECODER, "num_key_value_heads": 2}
VISION = {**ENCODER, "image_size": 32, "patch_size": 8}
STAGES = {"depths": [1, 1], "num_channels": 3}
SEQ2SEQ = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 96,
    **SPECIAL,
    "decoder_start_token_id": 2,
}

CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertModel", TEXT),
    "bert_classifier": ("BertConfig", "BertForSequenceClassification", TEXT),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertModel",
        {"dim": 64, "n_heads": 4, "n_layers": 2, "hidden_dim": 128, **WORDS},
    ),
    "roberta": ("RobertaConfig", "RobertaModel", TEXT),
    "albert": ("AlbertConfig", "AlbertModel", {**TEXT, "embedding_size": 32}),
    "electra": ("ElectraConfig", "ElectraModel", {**TEXT, "embedding_size": 32}),
    "deberta_v2": (
        "DebertaV2Config",
        "DebertaV2Model",
        {
            **TEXT,
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "position_buckets": 16,
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
            "type_vocab_size": 0,
        },
    ),
    "mpnet": ("MPNetConfig", "MPNetModel", TEXT),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 96, **SPECIAL},
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXModel", DECODER),
    "opt": ("OPTConfig", "OPTForCausalLM", {**DECODER, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER),
    "mistral": ("MistralConfig", "MistralForCausalLM", GROUPED),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**GROUPED, "head_dim": 16}),
    "gemma": (
        "GemmaConfig",
        "GemmaForCausalLM",
        {**DECODER, "num_key_value_heads": 1, "head_dim": 16},
    ),
    "phi": ("PhiConfig", "PhiForCausalLM", DECODER),
    "falcon": ("FalconConfig", "FalconForCausalLM", {**DECODER, "ffn_hidden_size": 128}),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {"hidden_size": 64, "n_head": 4, "n_layer": 2, "vocab_size": 96, "use_cache": False},
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            **{"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
            **{"vocab_size": 96, "use_cache": False, "decoder_start_token_id": 0},
        },
    ),
    "bart": ("BartConfig", "BartForConditionalGeneration", {**SEQ2SEQ, **WORDS}),
    "vit": ("ViTConfig", "ViTForImageClassification", VISION),
    "deit": ("DeiTConfig", "DeiTForImageClassification", VISION),
    "swin": (
        "SwinConfig",
        "SwinForImageClassification",
        {
            **{"image_size": 32, "patch_size": 2, "embed_dim": 32, "window_size": 4},
            **{"depths": [2, 2], "num_heads": [2, 4]},
        },
    ),
    "beit": (
        "BeitConfig",
        "BeitForImageClassification",
        {**VISION, "use_relative_position_bias": True},
    ),
    "convnext": (
        "ConvNextConfig",
        "ConvNextForImageClassification",
        {**STAGES, "hidden_sizes": [32, 64], "num_stages": 2, "image_size": 32},
    ),
    "resnet": (
        "ResNetConfig",
        "ResNetForImageClassification",
        {**STAGES, "embedding_size": 16, "hidden_sizes": [32, 64]},
    ),
    "mobilenet_v2": (
        "MobileNetV2Config",
        "MobileNetV2ForImageClassification",
        {"image_size": 32, "depth_multiplier": 0.5},
    ),
    "segformer": (
        "SegformerConfig",
        "SegformerForSemanticSegmentation",
        {
            **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1]},
            **{"hidden_sizes": [32, 64], "patch_sizes": [7, 3], "strides": [4, 2]},
            **{"num_attention_heads": [2, 4], "mlp_ratios": [2, 2], "decoder_hidden_size": 64},
        },
    ),
    "clip": (
        "CLIPConfig",
        "CLIPModel",
        {"text_config": DECODER, "vision_config": VISION, "projection_dim": 32},
    ),
    "clip_text": ("CLIPTextConfig", "CLIPTextModel", DECODER),
    "wav2vec2": (
        "Wav2Vec2Config",
        "Wav2Vec2ForCTC",
        {
            **{**ENCODER, "vocab_size": 32, "apply_spec_augment": False},
            **{"conv_dim": [32, 32], "conv_kernel": [10, 3], "conv_stride": [5, 2]},
            **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16},
            "num_conv_pos_embedding_groups": 4,
        },
    ),
    "whisper": (
        "WhisperConfig",
        "WhisperForAudioClassification",
        {**SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 24, "classifier_proj_size": 32},
    ),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {
            **{"hidden_size": 64, "state_size": 4, "num_hidden_layers": 2},
            **{"vocab_size": 96, "use_cache": False},
        },
    ),
}


def build(name: str) -> nn.Module:
    """Return an architecture whose weights are as uneven as training leaves them."""
    return made(*CONFIGS[name])


def made(config: str, model: str, settings: dict[str, Any]) -> nn.Module:
    """Return a model of transformers with such weights, by its class and its config's."""
    torch.manual_seed(0)
    module: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() <= 1 or not parameter.std() > 1e-6:  # zeros and ones hide mistakes
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return module


def _words(*names: str, length: int | str = "sequence") -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name=n, shape=("batch", length), dtype="int64") for n in names)


def _floats(name: str, *shape: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec(name=name, shape=("batch", *shape)),)


IMAGE = _floats("pixel_values", 3, 32, 32)
IMAGED = ("vit", "deit", "swin", "beit", "convnext", "resnet", "mobilenet_v2", "segformer")
# Their tables of positions limit the length, which torch.export then refuses to leave open.
FIXED = ("bert", "bert_classifier", "distilbert", "albert", "electra", "deberta_v2")
# A causal model has no defined answer at a padded first word, as random masks have.
CAUSAL = (
    *("gpt2", "gpt_neox", "opt", "llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "falcon"),
    *("bloom", "mamba"),
)
SPECS: dict[str, tuple[TensorSpec, ...]] = {
    **dict.fromkeys(CONFIGS, _words("input_ids", "attention_mask")),
    **dict.fromkeys(FIXED, _words("input_ids", "attention_mask", length=8)),
    **dict.fromkeys(CAUSAL, _words("input_ids")),
    **dict.fromkeys(("clip_text", "mamba"), _words("input_ids", length=8)),
    **dict.fromkeys(("t5", "bart"), _words("input_ids", "attention_mask", "decoder_input_ids")),
    **dict.fromkeys(IMAGED, IMAGE),
    "clip": (*_words("input_ids", length=8), *IMAGE),
    "wav2vec2": _floats("input_values", 400),
    "whisper": _floats("input_features", 16, 48),
}


def _case(name: str) -> Case:
    signature = Signature(inputs=SPECS[name])
    return Case(name, f"{__name__}:build", signature.example, {"name": name}, specs=SPECS[name])


TRANSFORMERS = tuple(_case(name) for name in CONFIGS)
