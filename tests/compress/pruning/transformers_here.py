"""What a user's own file looks like: models from transformers, in several wrappings."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    BertForSequenceClassification,
    ConvNextV2Config,
    ConvNextV2ForImageClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    ViTConfig,
)

TEXT = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}


def bert() -> nn.Module:
    """Return the model as it is; its output is a mapping with attributes."""
    return AutoModel.from_config(BertConfig(**TEXT))


def bert_classifier(width: int = 32, heads: int = 4, inner: int = 64) -> nn.Module:
    """Return a classifier whose hidden width no output shows."""
    sizes = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": inner}
    return BertForSequenceClassification(BertConfig(**{**TEXT, **sizes}, num_labels=3))


def convnextv2() -> nn.Module:
    """Return a classifier with a LayerNorm and a global response normalisation in each block."""
    sizes = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "patch_size": 2}
    return ConvNextV2ForImageClassification(ConvNextV2Config(**sizes, num_labels=5))


def llama() -> nn.Module:
    """Return a classifier on a decoder, whose output holds a cache of keys and values too."""
    return LlamaForSequenceClassification(LlamaConfig(**TEXT, num_labels=3, pad_token_id=0))


class Encoder(nn.Module):
    """Mean of the words that are not padding, of length one."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = bert()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        words = self.backbone(input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(words.dtype)
        return nn.functional.normalize((words * mask).sum(1) / mask.sum(1).clamp_min(1), dim=-1)


class Named(Encoder):
    """The same, and a score, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 3))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict:
        embedding = super().forward(input_ids, attention_mask)
        return {"embedding": embedding, "scores": self.head(embedding)}


@dataclass
class Answer:
    """What the model below returns."""

    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class Classifier(nn.Module):
    """An image model with the user's own head, whose answer is a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"image_size": 16, "patch_size": 4, "hidden_size": 32, "num_attention_heads": 4}
        self.vit = AutoModel.from_config(
            ViTConfig(**sizes, num_hidden_layers=2, intermediate_size=64)
        )
        self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 5))

    def forward(self, pixel_values: torch.Tensor) -> Answer:
        return Answer(logits=self.head(self.vit(pixel_values).last_hidden_state[:, 0]))
