"""Small encoders of sequences with channels that are far larger than others."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS = 32, 4


class Layer(nn.Module):
    """Attention and a feed-forward layer, the norms before them; no constant is shared."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.activation = getattr(F, activation)
        with torch.no_grad():
            for norm in (self.norm1, self.norm2):
                norm.weight.uniform_(0.5, 1.5)
                norm.weight[::8] *= 30
                norm.bias.uniform_(-1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        query, key, value = (
            layer(y).view(*y.shape[:2], HEADS, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(y.shape))
        return x + self.down(self.activation(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """Layers over tokens; the head reads the last norm, which is an output too."""

    def __init__(self, activation: str = "gelu", layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.Sequential(*(Layer(activation) for _ in range(layers)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(self.layers(self.dropout(self.embedding(tokens))))
        return self.head(x), x


def rows() -> nn.Module:
    """Return layers over single rows; a gelu stands before the second, which reads outliers."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.ReLU())
    module.append(nn.Linear(32, 4))
    with torch.no_grad():
        module[0].weight[:2] *= 30
        module[2].weight[:, :2] /= 30
    return module


encoder = Encoder


class Decoder(nn.Module):
    """PyTorch's decoder layers, which attend to a second sequence, made of the first."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True)
        self.memory, self.decoder = nn.Linear(WIDTH, WIDTH), nn.TransformerDecoder(layer, 2)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder(x, self.memory(x)).mean(1))
