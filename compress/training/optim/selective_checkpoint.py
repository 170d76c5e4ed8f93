"""Selective activation checkpointing: save the results that cost most FLOPs, within a budget.

As the memory budget of torch.compile, which is used for compiled models, for those that are not.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import flop_registry

from compress.common.process import random_state_kept

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import nn

    ContextPair = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    Contexts = Callable[[], ContextPair]

# torch 2.13 counts no FLOPs of the CPU's attention kernel.
FLOPS = flop_registry | {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        flop_registry[torch.ops.aten._scaled_dot_product_flash_attention]
    )
}
"""Functions that count an operator's FLOPs; operators without one are cheap."""


class SelectiveBlock:
    """Replaces a block's forward: expensive results are saved, all others computed again."""

    def __init__(
        self, block: nn.Module, budget: float, with_buffers: Callable[[Contexts], ContextPair]
    ) -> None:
        self.block, self.forward, self.budget = block, block.forward, budget
        self.with_buffers = with_buffers
        self.saved: frozenset[int] | None = None
        """Positions of the saved results among those of expensive operators in one call."""
        block.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block; the first call measures it before."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if self.saved is None:
            self.saved = self._choose(*args, **kwargs)
        return checkpoint(
            self.forward,
            *args,
            use_reentrant=False,
            context_fn=partial(self.with_buffers, self._contexts),
            **kwargs,
        )

    def _contexts(self) -> ContextPair:
        """Return torch's contexts of forward pass and recomputation."""
        saved = self.saved or frozenset()
        # torch 2.11 asks the policy while it computes again, too; 2.13 in the forward pass alone,
        # where `is_recompute` is always False.
        positions = {False: -1, True: -1}

        def policy(context: Any, operator: Any, *_: object, **named: object) -> CheckpointPolicy:
            if operator.overloadpacket in FLOPS:
                positions[context.is_recompute] += 1
                if positions[context.is_recompute] in saved:
                    return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call, no-any-return]

    def _choose(self, *args: Any, **kwargs: Any) -> frozenset[int]:
        """Run the block once, and choose the results that save most FLOPs within the budget.

        Random numbers and buffers stay as they are.
        """
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        buffers = list(self.block.buffers())
        before = [buffer.clone() for buffer in buffers]
        recorder = _Recorder()
        device = inputs[0].device if inputs else "cpu"
        hooks = saved_tensors_hooks(recorder.pack, lambda tensor: tensor)
        with random_state_kept(str(device)), torch.enable_grad(), recorder, hooks:
            # Alive, the outputs hold what is saved, so that no address of memory is used twice.
            outputs = self.forward(*args, **kwargs)
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
        weights = {t.untyped_storage()._cdata for t in (*self.block.parameters(), *buffers)}
        kept = {c: size for c, size in recorder.saved_bytes.items() if c not in weights}
        # A checkpoint keeps the inputs.
        given = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in inputs}
        del outputs
        total = sum(kept.values())
        room = self.budget - sum(given.values()) / max(1, total)
        useful = [
            (position, flops, size / max(1, total))
            for position, (flops, size) in enumerate(recorder.results[: recorder.useful])
        ]
        if room <= 0 or not useful:
            return frozenset()
        _, chosen, _ = dp_knapsack([u[2] for u in useful], [float(u[1]) for u in useful], room)
        return frozenset(useful[index][0] for index in chosen)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records FLOPs and bytes of expensive operators' results, and what is saved for backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: list[tuple[int, int]] = []
        self.saved_bytes: dict[int, int] = {}
        self.useful = 0
        """Number of results before the last tensor that is saved for the backward pass: recomputing
        ends there, so that later ones need not be saved."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if count := FLOPS.get(func.overloadpacket):
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            self.results.append((count(*args, **(kwargs or {}), out_val=result), size))
        return result

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Record a tensor that is saved for the backward pass."""
        storage = tensor.untyped_storage()
        self.saved_bytes[storage._cdata] = storage.nbytes()
        self.useful = len(self.results)
        return tensor.detach()  # an operator that held its own output would never be freed
