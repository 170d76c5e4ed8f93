"""More architectures of transformers, small: the kinds that pruning's list has not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.compress.pruning.zoo import architectures as known

if TYPE_CHECKING:
    from torch import nn

DECODER, ENCODER, GROUPED, TEXT, VISION = (
    *(known.DECODER, known.ENCODER, known.GROUPED, known.TEXT, known.VISION),
)
SPEECH = known.CONFIGS["wav2vec2"][2]

CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "xlm_roberta": ("XLMRobertaConfig", "XLMRobertaForTokenClassification", TEXT),
    "squeezebert": (
        "SqueezeBertConfig",
        "SqueezeBertForSequenceClassification",
        {**TEXT, "embedding_size": 64},
    ),
    "convbert": (
        "ConvBertConfig",
        "ConvBertModel",
        {**TEXT, "embedding_size": 32, "conv_kernel_size": 3},
    ),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertForSequenceClassification",
        {**TEXT, "local_attention": 8, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "fnet": ("FNetConfig", "FNetModel", {**TEXT, "use_tpu_fourier_optimizations": False}),
    "xlnet": (
        "XLNetConfig",
        "XLNetModel",
        {"vocab_size": 96, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128},
    ),
    "gpt_neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            **{"vocab_size": 96, "max_position_embeddings": 64, "hidden_size": 64},
            **{"num_layers": 2, "num_heads": 4, "window_size": 8},
            **{"attention_types": [[["global", "local"], 1]], "use_cache": False},
        },
    ),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**GROUPED, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", GROUPED),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", DECODER),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "marian": ("MarianConfig", "MarianMTModel", {**known.SEQ2SEQ, **known.WORDS}),
    "dinov2": ("Dinov2Config", "Dinov2Model", VISION),
    "siglip": ("SiglipVisionConfig", "SiglipVisionModel", VISION),
    "yolos": (
        "YolosConfig",
        "YolosModel",
        {**VISION, "image_size": [32, 32], "num_detection_tokens": 5},
    ),
    "dpt": (
        "DPTConfig",
        "DPTForDepthEstimation",
        {
            **{**VISION, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
            **{"neck_hidden_sizes": [8, 16, 32, 64], "fusion_hidden_size": 16},
        },
    ),
    "efficientnet": (
        "EfficientNetConfig",
        "EfficientNetForImageClassification",
        {
            **{"image_size": 32, "width_coefficient": 0.5, "hidden_dim": 640},
            **{"kernel_sizes": [3, 5], "in_channels": [32, 16], "out_channels": [16, 24]},
            **{"strides": [1, 2], "num_block_repeats": [1, 2], "expand_ratios": [1, 6]},
            **{"depthwise_padding": [], "dropout_rate": 0.0},
        },
    ),
    "mobilevit": (
        "MobileViTConfig",
        "MobileViTForImageClassification",
        {
            **{"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": 4},
            **{"neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64]},
        },
    ),
    "regnet": (
        "RegNetConfig",
        "RegNetForImageClassification",
        {
            **{"embedding_size": 16, "hidden_sizes": [16, 32, 32, 64], "depths": [1, 1, 1, 1]},
            "groups_width": 8,
        },
    ),
    "poolformer": (
        "PoolFormerConfig",
        "PoolFormerForImageClassification",
        {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
    ),
    "hubert": ("HubertConfig", "HubertForSequenceClassification", SPEECH),
    "sew": ("SEWConfig", "SEWForCTC", {**SPEECH, "squeeze_factor": 2}),
    "ast": (
        "ASTConfig",
        "ASTForAudioClassification",
        {**ENCODER, "patch_size": 8, "max_length": 32, "num_mel_bins": 16},
    ),
    "videomae": (
        "VideoMAEConfig",
        "VideoMAEForVideoClassification",
        {**VISION, "num_frames": 4, "tubelet_size": 2},
    ),
}


def build(name: str) -> nn.Module:
    """Return an architecture whose weights are as uneven as training leaves them."""
    return known.made(*CONFIGS[name])
