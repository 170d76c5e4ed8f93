"""Memory of activation checkpointing: `python benchmarks/activations.py`.

Prints for a transformer of 16 layers, under each setting, the bytes that a forward pass leaves for
the backward pass, the highest number of bytes at any time of both, and how many matrix products
they take, each beside those without checkpointing. Storages are counted once, weights, gradients
and the input not at all.
"""

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from compress.training.config.training import Training
from compress.training.optim.transformer_blocks import checkpoint_activations_

DEPTH, WIDTH, MEBIBYTE = 16, 256, 2**20
SETTINGS = ("none", 2, "selective", {"segments": "auto"}, "full")


class LiveBytes(TorchDispatchMode):
    """Counts the memory of all results that are still there, without keeping any."""

    def __init__(self, given) -> None:
        super().__init__()
        self.given = {tensor.untyped_storage()._cdata for tensor in given}
        self.storages, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.given:
                    reference = StorageWeakRef(storage)
                    self.storages[reference.cdata] = reference, storage.nbytes()
        self.peak = max(self.peak, self.current())
        return result

    def current(self) -> int:
        self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
        return sum(size for _, size in self.storages.values())


def measure(module: nn.Module, x: torch.Tensor) -> tuple[int, int, int]:
    """Return bytes after the forward pass, bytes at the peak, and FLOPs."""
    weights = list(module.parameters())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    gradients = [weight.grad for weight in weights]
    module(x)  # `selective` measures each block in its first call
    # Apart, because FlopCounterMode keeps results for longer.
    with FlopCounterMode(display=False) as flops:
        module(x).square().mean().backward()
    for gradient in gradients:
        gradient.zero_()
    torch.manual_seed(1)  # of dropout
    with LiveBytes([x, *weights, *gradients]) as live:
        loss = module(x).square().mean()
        saved = live.current()
        loss.backward()
    return saved, live.peak, flops.get_total_flops()


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(16, 64, WIDTH)
    for title, options in {
        "ReLU, dropout 0.1": {"dropout": 0.1},
        "GELU, normalized first, no dropout": {
            "dropout": 0.0, "activation": "gelu", "norm_first": True
        },
        "ReLU, feed-forward width 2048, no dropout": {
            "dropout": 0.0, "dim_feedforward": 2048
        },
    }.items():  # fmt: skip
        print(f"\n{title}: {DEPTH} layers of width {WIDTH}, 16 x 64 tokens, fp32\n")
        print("| `activation_checkpointing` | saved MiB | peak MiB | matrix FLOPs | gradients |")
        print("|---|---|---|---|---|")
        reference = []
        for setting in SETTINGS:
            torch.manual_seed(0)
            options = {"dim_feedforward": 4 * WIDTH, **options}
            layers = [
                nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True, **options)
                for _ in range(DEPTH)
            ]
            module = nn.Sequential(*layers)
            checkpoint_activations_(module, Training(epochs=1, activation_checkpointing=setting))
            figures = measure(module, x)
            gradients = [weight.grad for weight in module.parameters()]
            reference = reference or [figures, gradients]
            same = all(map(torch.equal, gradients, reference[1]))
            saved, peak, flops = figures
            word = "{segments: auto}" if isinstance(setting, dict) else setting
            print(
                f"| `{word}` | {saved / MEBIBYTE:.0f} | {peak / MEBIBYTE:.0f} "
                f"| x {flops / reference[0][2]:.2f} | {'bit-equal' if same else 'differ'} |"
            )


if __name__ == "__main__":
    main()
