"""Factories of the text encoders, for `model.factory`; transformers is imported as users do."""

import torch
from pruner.sentences import Encoder
from torch import nn
from transformers import BertConfig, BertModel


class FirstToken(nn.Module):
    """A BERT-base whose embedding of a text is its first token's."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.bert(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]


def sentence_encoder(config: str) -> nn.Module:
    """Return a BERT whose tokens' mean, of length 1, stands for the sentence."""
    return Encoder(BertConfig.from_pretrained(config))


def bert_base() -> nn.Module:
    """Return a BERT-base of seeded weights."""
    torch.manual_seed(0)
    return FirstToken()
