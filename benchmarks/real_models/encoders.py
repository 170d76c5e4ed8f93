"""Factories of the encoders, for `model.factory`; transformers is imported as users do."""

import torch
from pruner.sentences import Encoder
from torch import nn
from transformers import BertConfig, BertModel, ViTConfig, ViTForImageClassification


class FirstToken(nn.Module):
    """A BERT-base whose embedding of a text is its first token's."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]


class ImageClassifier(nn.Module):
    """A ViT-S/16 that answers with the scores of 1000 classes."""

    def __init__(self) -> None:
        super().__init__()
        # As in DeiT's paper (arXiv:2012.12877); other sizes are the configuration's own.
        config = ViTConfig(
            hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_labels=1000
        )
        self.vit = ViTForImageClassification(config)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.vit(pixel_values=image).logits


def sentence_encoder(config: str) -> nn.Module:
    """Return a BERT whose tokens' mean, of length 1, stands for the sentence."""
    return Encoder(BertConfig.from_pretrained(config))


def bert_base() -> nn.Module:
    """Return a BERT-base of seeded weights."""
    torch.manual_seed(0)
    return FirstToken()


def vit_small() -> nn.Module:
    """Return a ViT-S/16 of seeded weights."""
    torch.manual_seed(0)
    return ImageClassifier()
