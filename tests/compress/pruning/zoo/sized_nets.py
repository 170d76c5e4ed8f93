"""Networks whose code computes the sizes of reshapes, splits and slices from other tensors."""

import torch
import torch.nn.functional as F
from torch import nn


class CausalAttention(nn.Module):
    """One projection of queries, keys and values, and reshapes by the width of the input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head, self.n_embd, self.dropout = heads, width, 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class NanoGPT(nn.Module):
    """Two blocks of a decoder with tied embeddings, written as nanoGPT's are."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(13, width), nn.Embedding(16, width)
        self.h = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln_1": nn.LayerNorm(width),
                    "attn": CausalAttention(width, heads),
                    "ln_2": nn.LayerNorm(width),
                    "mlp": nn.Sequential(
                        nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
                    ),
                }
            )
            for _ in range(2)
        )
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, 13, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = x + block["attn"](block["ln_1"](x))
            x = x + block["mlp"](block["ln_2"](x))
        return self.lm_head(self.ln_f(x))


class PatchAttention(nn.Module):
    """Attention of timm's older models: `reshape(B, N, C)`, and the scale in an attribute."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.scale = heads, (width // heads) ** -0.5
        self.norm = nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, width * 3), nn.Linear(width, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        B, N, C = y.shape
        qkv = self.qkv(y).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1)
        y = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.head(x + self.proj(y)).mean(1)


class SharedKeys(nn.Module):
    """One projection of queries and of keys and values that they share (Phi-3), cut by slices."""

    def __init__(self, width: int = 32, heads: int = 4, key_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, width + 2 * key_heads * width // heads)
        self.proj, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        d, times = c // self.heads, self.heads // self.key_heads
        qkv, shared = self.qkv(self.norm(x)), self.key_heads * d
        q, k, v = qkv[..., :c], qkv[..., c : c + shared], qkv[..., c + shared :]
        q = q.view(b, t, self.heads, d).transpose(1, 2)
        k, v = (part.view(b, t, self.key_heads, d).transpose(1, 2) for part in (k, v))
        k, v = (
            part[:, :, None].expand(b, self.key_heads, times, t, d).reshape(b, self.heads, t, d)
            for part in (k, v)
        )
        y = ((q @ k.transpose(-2, -1)) * d**-0.5).softmax(-1) @ v
        return self.head(x + self.proj(y.transpose(1, 2).reshape(b, t, c))).mean(1)


def shuffled(x: torch.Tensor, groups: int) -> torch.Tensor:
    n, c, h, w = x.size()
    x = x.view(n, groups, c // groups, h, w)
    return x.transpose(1, 2).contiguous().view(n, c, h, w)


def normed(inputs: int, outputs: int, size: int, is_last: bool = False, **more) -> nn.Sequential:
    layers = [
        nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False, **more),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, *[nn.ReLU(inplace=True)] * is_last)


class ShuffleUnit(nn.Module):
    """Passes one half of the channels on, or convolves both where it halves the image."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, half = stride, outputs // 2
        read = inputs if stride > 1 else half
        if stride > 1:
            self.branch1 = nn.Sequential(
                normed(inputs, inputs, 3, stride=stride, groups=inputs),
                normed(inputs, half, 1, is_last=True),
            )
        self.branch2 = nn.Sequential(
            normed(read, half, 1, is_last=True),
            normed(half, half, 3, stride=stride, groups=half),
            normed(half, half, 1, is_last=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stride == 1:
            x1, x2 = x.chunk(2, dim=1)
            return shuffled(torch.cat((x1, self.branch2(x2)), dim=1), 2)
        return shuffled(torch.cat((self.branch1(x), self.branch2(x)), dim=1), 2)


class ShuffleNetV2(nn.Module):
    """Units that split channels, concatenate and shuffle them, three in the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = normed(1, 8, 3, is_last=True)
        self.units = nn.Sequential(
            *(ShuffleUnit(8, 16, 2), ShuffleUnit(16, 16, 1), ShuffleUnit(16, 16, 1)),
            *(ShuffleUnit(16, 32, 2), ShuffleUnit(32, 32, 1)),
        )
        self.last = normed(32, 48, 1, is_last=True)
        self.fc = nn.Linear(48, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.last(self.units(self.stem(x))).mean((2, 3)))
