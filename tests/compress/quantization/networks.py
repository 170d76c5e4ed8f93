"""Small real networks that the tests of quantization and export build by factory."""

import torch
import torch.nn.functional as F
from torch import nn


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)
    )


class Scaled(nn.Linear):
    """A linear layer of numbers that are nearly zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * 1e-20)


def probabilities() -> nn.Module:
    """Return linear layers whose scores are moved, and read by a softmax."""
    layers = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Unflatten(1, (2, 4)), nn.Softmax(-1)
    return nn.Sequential(*layers)


def vanishing() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Scaled(8, 8), nn.ReLU(), nn.Linear(8, 3))


class MobileNet(nn.Module):
    """Depthwise and pointwise convolutions with relu6, max and average pooling."""

    def __init__(self) -> None:
        super().__init__()

        def layer(channels_in: int, channels_out: int, kernel: int, groups: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(
                    channels_in, channels_out, kernel, padding="same", groups=groups, bias=False
                ),
                nn.BatchNorm2d(channels_out),
                nn.ReLU6(),
            )

        self.stem = layer(1, 16, 3, 1)
        self.depthwise = layer(16, 16, 3, 16)
        self.pointwise = layer(16, 32, 1, 1)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(32, 10))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.stem(image), 2)
        x = F.avg_pool2d(self.pointwise(self.depthwise(x)), 2)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class TwoInputs(nn.Module):
    """An image and its context; returns two tensors in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.context = nn.Linear(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, image: torch.Tensor, context: torch.Tensor) -> dict[str, torch.Tensor]:
        x = F.relu(self.conv(image)).mean((2, 3)) + F.relu(self.context(context))
        return {"logits": self.head(x), "features": x}


class Sequence(nn.Module):
    """Layers over sequences of any length; integers in."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return x + self.down(F.gelu(self.up(x)))


class Banks(nn.Module):
    """Looks up matrices, of which some are multiplied and others added."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplied, self.added = (nn.Parameter(torch.rand(50, 16, 16)) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        ids = tokens.flatten()
        return torch.bmm(self.multiplied[ids], 1 + self.added[ids]).unflatten(0, tokens.shape)


class BakedBatch(nn.Module):
    """Adds a constant that has one row for each of two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.ones(2, 4)


class Unscriptable(nn.Module):
    """Uses Python that TorchScript does not know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(iter((2.0,)))


class BakedRows(nn.Module):
    """Reads the batch size as a Python number while traced."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.arange(int(x.shape[0]), dtype=x.dtype).reshape(-1, 1).expand(
            int(x.shape[0]), 4
        )


class Diverging(nn.Module):
    """Divides by zero in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) / (x - x))


class Aliases(nn.Module):
    """Writes in place into tensors that views of them are read through."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.side = nn.Conv2d(16, 8, 1)
        self.tail = nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(16, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        first, second = x.chunk(2, 1)
        first.relu_()
        second += self.side(x)
        x = self.tail(x)
        rows = x.view(-1, 16, 64)
        x.relu_()
        return self.head(rows.mean(2))


class Branches(nn.Module):
    """A relu and an addition both read one convolution; the addition subtracts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.tail = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        y = F.max_pool2d(self.tail(F.relu(x)), 3, 1, 1)
        return self.head(torch.add(x, y, alpha=-3).mean((2, 3)))


class Residual(nn.Module):
    """A block whose input is added to its result."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(image))
        x = F.relu(self.second(F.relu(self.first(x))) + x)
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    """Fused attention of two heads, whose result is viewed as one."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).unflatten(2, (2, 8)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2)
        return self.head(mixed.reshape(*x.shape[:2], 16))


class OwnModule(nn.Module):
    """Has a submodule named ``module``; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.module(x))}


class OwnModuleFlat(OwnModule):
    """The same, returning a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.module(x))


class Halves(nn.Module):
    """Divides integers truly, which old TorchScript truncated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.div(x.long(), 2)


class Recurrent(nn.Module):
    """A transposed convolution, an LSTM and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(4, 6, 2, stride=2)
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.up(x).transpose(1, 2))
        return self.head(states)


class Eigenvalues(nn.Module):
    """Computes what ONNX has no operator for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvals(x[:, :, None] * x[:, None]).real


def flattened() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))


def unquantizable() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(4), nn.GELU())


class TwoAdditions(nn.Module):
    """Two residual blocks, each of one convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(image))
        x = F.relu(x + self.first(x))
        return F.relu(x + self.second(x)).flatten(1)


class Depthwise(nn.Module):
    """Depthwise and pointwise convolutions with relu; channels of unequal size."""

    def __init__(self) -> None:
        super().__init__()

        def layer(channels_in: int, channels_out: int, kernel: int, groups: int) -> nn.Module:
            norm = nn.BatchNorm2d(channels_out)
            nn.init.uniform_(norm.running_mean, -0.3, 0.3)
            with torch.no_grad():
                norm.weight.copy_(torch.logspace(-1, 1, channels_out)[torch.randperm(channels_out)])
            conv = nn.Conv2d(
                channels_in, channels_out, kernel, padding="same", groups=groups, bias=False
            )
            return nn.Sequential(conv, norm, nn.ReLU())

        self.layers = nn.Sequential(layer(1, 16, 3, 1), layer(16, 16, 3, 16), layer(16, 24, 1, 1))
        self.head = nn.Linear(24, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(image).mean((2, 3)))


mobilenet, two_inputs, sequence = MobileNet, TwoInputs, Sequence
attention = Attention
baked_batch, baked_rows = BakedBatch, BakedRows
aliases, branches, residual = Aliases, Branches, Residual
own_module, own_module_flat = OwnModule, OwnModuleFlat
halves, recurrent, eigenvalues = Halves, Recurrent, Eigenvalues
diverging, unscriptable = Diverging, Unscriptable

depthwise, two_additions = Depthwise, TwoAdditions
