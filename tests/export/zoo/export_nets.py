"""Networks whose export is hard: open lengths and sizes, branches, states, and many outputs."""

import torch
import torch.nn.functional as F
from torch import nn


class Tagger(nn.Module):
    """Words of any number through an embedding and two recurrent layers in both directions."""

    def __init__(self, kind: str = "LSTM") -> None:
        super().__init__()
        self.words = nn.Embedding(50, 12)
        self.recurrent = getattr(nn, kind)(12, 10, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(20, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.words(words))[0])


class Forecaster(nn.Module):
    """A GRU whose state comes in and goes out, over a series of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, series: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, last = self.gru(series.transpose(0, 1), state[None])
        return self.head(y).transpose(0, 1), last[0]


class Segmenter(nn.Module):
    """A U-Net with transposed convolutions for images of any height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(3, 8), _block(8, 16), _block(16, 32)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.join = nn.ModuleList([_block(32, 16), _block(16, 8)])
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = F.pad(image, (0, -image.shape[3] % 4, 0, -image.shape[2] % 4))
        first = self.down[0](x)
        second = self.down[1](F.max_pool2d(first, 2))
        x = self.down[2](F.max_pool2d(second, 2))
        x = self.join[0](torch.cat([self.up[0](x), second], 1))
        x = self.join[1](torch.cat([self.up[1](x), first], 1))
        return self.head(x)[:, :, : image.shape[2], : image.shape[3]]


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
    )


class Dilated(nn.Module):
    """Dilated convolutions and a pooled branch, scaled back to the image's size (DeepLab)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.branches = nn.ModuleList(
            nn.Conv2d(16, 8, 3, padding=rate, dilation=rate) for rate in (1, 2, 4)
        )
        self.pooled = nn.Conv2d(16, 8, 1)
        self.head = nn.Conv2d(32, 4, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(image))
        pooled = self.pooled(x.mean((2, 3), keepdim=True)).expand(-1, -1, *x.shape[2:])
        x = self.head(torch.cat([*(branch(x) for branch in self.branches), pooled], 1))
        return F.interpolate(x, image.shape[2:], mode="bilinear", align_corners=False)


class Detector(nn.Module):
    """Boxes on grids of two scales, with scores; the best ones by topk; outputs in a dict."""

    def __init__(self, best: int = 10) -> None:
        super().__init__()
        self.best = best
        self.stem, self.deep = _block(3, 16), _block(16, 16)
        self.boxes, self.scores = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 3, 1)

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        fine = F.max_pool2d(self.stem(image), 4)
        levels = [fine, F.max_pool2d(self.deep(fine), 2)]
        boxes = torch.cat([self._boxes(x, 4 * 2**i) for i, x in enumerate(levels)], 1)
        scores = torch.cat([self.scores(x).flatten(2).mT for x in levels], 1).sigmoid()
        best, where = scores.amax(2).topk(self.best, 1)
        found = boxes.gather(1, where[..., None].expand(-1, -1, 4))
        return {"boxes": found, "scores": best, "labels": scores.argmax(2).gather(1, where)}

    def _boxes(self, x: torch.Tensor, stride: int) -> torch.Tensor:
        rows, columns = (torch.arange(n, device=x.device) * stride for n in x.shape[2:])
        centres = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).flatten(0, 1)
        offsets, sizes = self.boxes(x).flatten(2).mT.split(2, 2)
        return torch.cat([centres + offsets.tanh() * stride, sizes.exp() * stride], 2)


class Spectral(nn.Module):
    """A waveform's spectrogram by the Fourier transform, then convolutions over time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(32))
        self.conv = nn.Conv1d(17, 16, 3, padding=1)
        self.head = nn.Linear(16, 4)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(wave, 32, 16, window=self.window, return_complex=True)
        return self.head(F.relu(self.conv(spectrum.abs().log1p())).mean(2))


class Ranker(nn.Module):
    """Tables of several features, numbers beside them, and their products (DLRM)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 8) for size in (20, 30, 40))
        self.numbers = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Linear(14, 1)

    def forward(self, categories: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        parts = [self.numbers(numbers)]
        parts += [table(categories[:, i]) for i, table in enumerate(self.tables)]
        features = torch.stack(parts, 1)
        products = features @ features.mT
        rows, columns = torch.tril_indices(4, 4, -1)
        return self.head(torch.cat([parts[0], products[:, rows, columns]], 1))


class Pooled(nn.Module):
    """Words without padding weighed by attention; what is masked counts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.score = nn.Embedding(50, 16), nn.Linear(16, 1)
        self.head = nn.Linear(16, 3)

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        score = self.score(x)[..., 0].masked_fill(~mask, torch.finfo(x.dtype).min)
        return self.head((score.softmax(1)[..., None] * x).sum(1))


class Cached(nn.Module):
    """One step of a decoder: the keys and values so far come in, one longer they go out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.project = nn.Embedding(50, 32), nn.Linear(32, 96)
        self.head = nn.Linear(32, 50)

    def forward(
        self, word: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        query, key, value = self.project(self.words(word)).unflatten(2, (3, 4, 8)).unbind(2)
        keys, values = torch.cat([keys, key], 1), torch.cat([values, value], 1)
        query, key, value = (x.transpose(1, 2) for x in (query, keys, values))
        x = F.scaled_dot_product_attention(query, key, value)
        return self.head(x.transpose(1, 2).flatten(2)), keys, values


class Cond(nn.Module):
    """Data-dependent control flow by torch.cond: bright batches take another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.bright, self.dark = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.mean() > 0, self.bright.forward, self.dark.forward, (x,))


class Branch(nn.Module):
    """Data-dependent control flow in Python: a plain `if` on the input's values."""

    def __init__(self) -> None:
        super().__init__()
        self.bright, self.dark = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean() > 0:
            return self.bright(x)
        return self.dark(x)


class Early(nn.Module):
    """Control flow on the sizes and on a setting, which every input of a model shares."""

    def __init__(self, deep: bool = True) -> None:
        super().__init__()
        self.deep = deep
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(x)) + x
            if i == 1 and (not self.deep or x.shape[1] > 64):
                break
        return x


class Video(nn.Module):
    """Factored convolutions over space and time, of any number of frames."""

    def __init__(self) -> None:
        super().__init__()
        self.space = nn.Conv3d(3, 8, (1, 3, 3), padding=(0, 1, 1))
        self.time = nn.Conv3d(8, 8, (3, 1, 1), padding=(1, 0, 0), groups=2)
        self.norm, self.head = nn.BatchNorm3d(8), nn.Linear(8, 4)

    def forward(self, clip: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.time(self.space(clip))))
        return self.head(F.avg_pool3d(x, (1, 2, 2)).mean((2, 3, 4)))


class Gate(nn.Module):
    """Squeeze and excite in a residual block, with hard activations (MobileNetV3)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.depthwise = nn.Conv2d(16, 16, 5, padding=2, groups=16, bias=False)
        self.norm, self.join = nn.BatchNorm2d(16), nn.Conv2d(16, 16, 1)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.head = nn.Linear(16, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = F.hardswish(self.stem(image))
        y = F.hardswish(self.norm(self.depthwise(x)))
        gate = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1))))
        x = x + self.join(y * F.hardsigmoid(gate))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Diffuser(nn.Module):
    """A step of diffusion: a time's sines and cosines, group norms, and attention over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.norm, self.attend = nn.GroupNorm(4, 16), nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, image: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        angles = time[:, None].float() * torch.exp(-torch.arange(8, device=time.device) / 2)
        times = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.norm(self.first(image)) + times[..., None, None]
        pixels = x.flatten(2).mT
        x = x + self.attend(pixels, pixels, pixels, need_weights=False)[0].mT.reshape(x.shape)
        return self.last(F.silu(x))


class Biased(nn.Module):
    """Fused attention with a learned table of positions as its mask (T5, Swin, BEiT)."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.head = nn.Linear(16, 48), nn.Linear(16, 16)
        self.table = nn.Parameter(torch.randn(2, 6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(2, (2, 8)).transpose(1, 2) for part in self.project(x).chunk(3, 2)
        )
        x = F.scaled_dot_product_attention(query, key, value, attn_mask=self.table[None])
        return self.head(x.transpose(1, 2).reshape(x.shape[0], -1, 16))


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.sigmoid() * (1 + x * (1 - x.sigmoid()))


class OwnFunction(nn.Module):
    """An activation whose gradient is written by hand, as a torch.autograd.Function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(_Swish.apply(self.first(x)))
