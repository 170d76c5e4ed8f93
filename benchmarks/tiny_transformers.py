"""Models of transformers with random weights: what each is built from, and what it takes.

The settings are those of the tests' zoo where it has the architecture; the weights are left as
transformers initializes them.
"""

import inspect
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path[:0] = [str(Path(__file__).parents[1])] * (str(Path(__file__).parents[1]) not in sys.path)

from compress.common.signature import OutputSpec, Signature, TensorSpec  # noqa: E402
from tests.compress.pruning.zoo import architectures as known  # noqa: E402
from tests.export.zoo import more_architectures as more  # noqa: E402

ZOO = {**known.CONFIGS, **more.CONFIGS}
TEXT, DECODER, VISION, SPEECH = known.TEXT, known.DECODER, known.VISION, more.SPEECH
WORDS = 96
"""Size of the vocabulary; 0 to 2 are special tokens."""

COMMON = {
    **{"bert": "BertForSequenceClassification", "roberta": "RobertaForSequenceClassification"},
    **{"distilbert": "DistilBertForSequenceClassification"},
    **{"albert": "AlbertForSequenceClassification", "electra": "ElectraForSequenceClassification"},
    **{"deberta_v2": "DebertaV2ForSequenceClassification"},
    **{"mpnet": "MPNetForSequenceClassification", "gpt2": "GPT2ForSequenceClassification"},
    **{"llama": "LlamaForSequenceClassification", "qwen2": "Qwen2ForSequenceClassification"},
    **{"vit": "ViTForImageClassification", "deit": "DeiTForImageClassification"},
    **{"swin": "SwinForImageClassification", "beit": "BeitForImageClassification"},
    **{"convnext": "ConvNextForImageClassification"},
    **{"convnextv2": "ConvNextV2ForImageClassification"},
    **{"mobilenet_v2": "MobileNetV2ForImageClassification"},
    **{"mobilevit": "MobileViTForImageClassification", "resnet": "ResNetForImageClassification"},
    **{"regnet": "RegNetForImageClassification"},
    **{"wav2vec2": "Wav2Vec2ForSequenceClassification"},
    **{"hubert": "HubertForSequenceClassification", "wavlm": "WavLMForSequenceClassification"},
}
"""Architecture → class, of 23 common ones."""
MORE = {
    **{"segformer": "SegformerForSemanticSegmentation", "detr": "DetrForObjectDetection"},
    **{"yolos": "YolosForObjectDetection", "dpt": "DPTForDepthEstimation"},
    **{"swin2sr": "Swin2SRForImageSuperResolution"},
    **{"data2vec_text": "Data2VecTextForSequenceClassification"},
    **{"nystromformer": "NystromformerForSequenceClassification"},
    **{"fnet": "FNetForSequenceClassification", "funnel": "FunnelForSequenceClassification"},
    **{"squeezebert": "SqueezeBertForSequenceClassification"},
    **{"xlm_roberta": "XLMRobertaForTokenClassification"},
    **{"mobilebert": "MobileBertForSequenceClassification"},
    **{"convbert": "ConvBertForSequenceClassification"},
    **{"modernbert": "ModernBertForSequenceClassification"},
    **{"roformer": "RoFormerForSequenceClassification"},
    **{"perceiver": "PerceiverForSequenceClassification", "t5": "T5EncoderModel"},
    **{"bart": "BartModel", "opt": "OPTForSequenceClassification"},
    **{"gpt_neo": "GPTNeoForSequenceClassification"},
    **{"gpt_neox": "GPTNeoXForSequenceClassification"},
    **{"bloom": "BloomForSequenceClassification", "falcon": "FalconForSequenceClassification"},
    **{"mistral": "MistralForSequenceClassification", "gemma": "GemmaForSequenceClassification"},
    **{"phi": "PhiForSequenceClassification", "bit": "BitForImageClassification"},
    **{"efficientnet": "EfficientNetForImageClassification"},
    **{"mobilenet_v1": "MobileNetV1ForImageClassification"},
    **{"levit": "LevitForImageClassification", "pvt": "PvtForImageClassification"},
    **{"poolformer": "PoolFormerForImageClassification"},
    **{"focalnet": "FocalNetForImageClassification"},
    **{"dinov2": "Dinov2ForImageClassification", "hiera": "HieraForImageClassification"},
    **{"sew": "SEWForSequenceClassification", "unispeech": "UniSpeechForSequenceClassification"},
    **{"ast": "ASTForAudioClassification", "whisper": "WhisperForAudioClassification"},
    **{"clip_vision": "CLIPVisionModel"},
}
"""Architecture → class, of 40 others, chosen before any of them was tried."""
CLASSES = {**COMMON, **MORE}

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "convnextv2": (
        "ConvNextV2Config",
        {"depths": [1, 1], "hidden_sizes": [32, 64], "num_stages": 2, "image_size": 32},
    ),
    "wavlm": ("WavLMConfig", {**SPEECH, "num_buckets": 32, "max_bucket_distance": 80}),
    "detr": (
        "DetrConfig",
        {
            **{"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "num_queries": 5},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
            **{"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "use_timm_backbone": False},
            **{"use_pretrained_backbone": False, "backbone": None},
            "backbone_config": transformers.ResNetConfig(
                embedding_size=16, hidden_sizes=[32, 64], depths=[1, 1], out_features=["stage2"]
            ),
        },
    ),
    "swin2sr": (
        "Swin2SRConfig",
        {
            **{"image_size": 16, "patch_size": 1, "embed_dim": 32, "depths": [2, 2]},
            **{"num_heads": [2, 2], "window_size": 4, "upscale": 2},
        },
    ),
    "data2vec_text": ("Data2VecTextConfig", TEXT),
    "nystromformer": ("NystromformerConfig", TEXT),
    "funnel": (
        "FunnelConfig",
        {
            **{"vocab_size": WORDS, "block_sizes": [1, 1], "num_decoder_layers": 1},
            **{"d_model": 64, "n_head": 4, "d_head": 16, "d_inner": 128},
        },
    ),
    "mobilebert": (
        "MobileBertConfig",
        {**TEXT, "embedding_size": 32, "intra_bottleneck_size": 32, "num_feedforward_networks": 2},
    ),
    "roformer": ("RoFormerConfig", {**TEXT, "embedding_size": 64}),
    "perceiver": (
        "PerceiverConfig",
        {
            **{"num_latents": 8, "d_latents": 64, "d_model": 48, "num_blocks": 1},
            **{"num_self_attends_per_block": 2, "num_self_attention_heads": 4},
            **{"num_cross_attention_heads": 4, "vocab_size": WORDS, "max_position_embeddings": 64},
        },
    ),
    "bit": (
        "BitConfig",
        {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 8},
    ),
    "mobilenet_v1": ("MobileNetV1Config", {"image_size": 32, "depth_multiplier": 0.25}),
    "levit": (
        "LevitConfig",
        {
            **{"image_size": 64, "hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 3, 4]},
            **{"depths": [1, 1, 1], "key_dim": [8, 8, 8]},
        },
    ),
    "pvt": (
        "PvtConfig",
        {
            **{"image_size": 32, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]},
            **{"num_attention_heads": [1, 2, 3, 4], "mlp_ratios": [2, 2, 2, 2]},
            **{"sequence_reduction_ratios": [4, 2, 1, 1], "patch_sizes": [4, 2, 2, 2]},
        },
    ),
    "focalnet": (
        "FocalNetConfig",
        {
            **{"image_size": 32, "embed_dim": 32, "hidden_sizes": [32, 64], "depths": [1, 1]},
            **{"focal_levels": [2, 2], "focal_windows": [3, 3]},
        },
    ),
    "hiera": (
        "HieraConfig",
        {
            **{"image_size": [32, 32], "embed_dim": 16, "depths": [1, 1, 1], "num_query_pool": 1},
            **{"num_heads": [1, 2, 4], "masked_unit_size": [4, 4], "query_stride": [2, 2]},
        },
    ),
    "unispeech": ("UniSpeechConfig", SPEECH),
    "clip_vision": ("CLIPVisionConfig", VISION),
}
"""Architecture → config and settings, where the tests' zoo does not have it."""


def build(name: str) -> torch.nn.Module:
    """Return an architecture with random weights."""
    config, settings = OTHERS.get(name) or (ZOO[name][0], ZOO[name][2])
    torch.manual_seed(0)
    built = getattr(transformers, config)(**{**settings, "num_labels": 3})
    if getattr(built, "pad_token_id", 0) is None:
        built.pad_token_id = 0  # classifiers on decoders refuse batches without it
    module: torch.nn.Module = getattr(transformers, CLASSES[name])(built)
    return module


def _text(*names: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name=n, shape=("batch", "length"), dtype="int64") for n in names)


def _floats(name: str, *shape: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec(name=name, shape=("batch", *shape)),)


SPECIAL = {
    **dict.fromkeys(("wav2vec2", "hubert", "wavlm", "sew", "unispeech"), ("input_values", 2000)),
    "ast": ("input_values", 32, 16),
    "whisper": ("input_features", 16, 48),
    **dict.fromkeys(("mobilevit", "levit"), ("pixel_values", 3, 64, 64)),
    "swin2sr": ("pixel_values", 3, 16, 16),
}


def signature(name: str) -> Signature:
    """Return what an architecture takes; batch and words are of any number."""
    if name in SPECIAL:
        return Signature(inputs=_floats(*SPECIAL[name]))
    parameters = inspect.signature(getattr(transformers, CLASSES[name]).forward).parameters
    if "pixel_values" in parameters:
        detects = (OutputSpec(name="logits"), OutputSpec(name="pred_boxes"))
        outputs = {"outputs": detects} if name in ("detr", "yolos") else {}
        return Signature(inputs=_floats("pixel_values", 3, 32, 32), **outputs)
    words = "inputs" if "inputs" in parameters else "input_ids"
    return Signature(inputs=_text(*(n for n in (words, "attention_mask") if n in parameters)))


def splits(name: str, length: int = 12) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Return seeded samples: normal floats, words of the vocabulary, masks of different lengths."""
    generator = torch.Generator().manual_seed(0)

    def value(spec: TensorSpec) -> torch.Tensor:
        shape = [length if size == "length" else size for size in spec.shape[1:]]
        if spec.dtype == "float32":
            return torch.randn(shape, generator=generator)
        if spec.unmasked_value is not None:
            return (
                torch.arange(length) < torch.randint(3, length + 1, (), generator=generator)
            ).long()
        return torch.randint(3, WORDS, shape, generator=generator)

    specs = signature(name).inputs
    return {
        split: [{spec.name: value(spec) for spec in specs} for _ in range(count)]
        for split, count in (("train", 64), ("val", 32))
    }
