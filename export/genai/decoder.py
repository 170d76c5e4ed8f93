"""A decoder of transformers with its cache of keys and values as inputs and outputs, in ONNX.

Attention becomes onnxruntime's `GroupQueryAttention`, which appends to the cache and applies the
causal mask and the rotary embeddings.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from compress.common.errors import StageFailed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.export.genai.decoder import fuse_operators_
from compress.export.onnx.lowering import lower
from compress.export.onnx.passes.rms_norm import use_fused_rms_norms_
from compress.graph.library_cache import patched_attribute
from compress.graph.torch_export import export_program

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

ATTENTION = "group_query_attention"
"""Name under which :class:`AttentionCalls` is registered while a decoder is traced."""
ROTARY = "apply_rotary_pos_emb"
"""Function of transformers' modules that applies rotary embeddings to queries and keys."""
ROTARY_MULTIPLE = 16
"""onnxruntime's rotary embeddings take heads whose size is a multiple of this."""
ANGLES_BY_LENGTH = ("dynamic", "longrope")
"""Types of rotary embeddings whose angles depend on the length of the text."""
PAST, PRESENT = "past_key_values.{}.{}", "present.{}.{}"
PARTS = ("key", "value")
INPUT_IDS, MASK, LOGITS = "input_ids", "attention_mask", "logits"


class CacheShape(NamedTuple):
    """Sizes of the cache, and of the attention that reads it."""

    layers: int
    heads: int
    """Heads of the queries."""
    cached_heads: int
    """Heads of keys and values."""
    head_size: int
    rotary_layers: int
    """Layers whose rotary embedding is part of `GroupQueryAttention`."""


class CachedDecoder(nn.Module):
    """A decoder that gets token ids, mask and cache, and returns scores and the longer cache."""

    def __init__(self, model: Any, context: int) -> None:
        super().__init__()
        self.model, self.calls = model, AttentionCalls()
        cos, sin = _rotary_table(model, context) or (None, None)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    @torch.no_grad()
    def cache_shape(self) -> CacheShape:
        """Return the cache's sizes, by a call; raise StageFailed where layers differ in them."""
        self.calls = AttentionCalls()
        with self._attention_replaced():
            self.model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
        shapes, layers = set(self.calls.shapes.values()), len(self.calls.shapes)
        if not shapes or sorted(self.calls.shapes) != list(range(layers)):
            raise StageFailed(
                f"the attention of {type(self.model).__name__} is not called as transformers' "
                "other decoders call theirs, or not by every layer, so that it cannot be cached"
            )
        if len(shapes) > 1:
            found = ", ".join(f"{h} and {k} of {size}" for h, k, size in sorted(shapes))
            raise StageFailed(
                "onnxruntime-genai has one number of heads for all layers, found heads of queries "
                f"and keys {found}; prune with scope: uniform"
            )
        return CacheShape(layers, *shapes.pop(), self.calls.rotary_layers)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return scores, and keys and values of each layer."""
        ids, mask, *past = inputs
        self.calls = AttentionCalls(
            past,
            (mask.sum(1) - 1).to(torch.int32),
            torch.full((), mask.shape[1], dtype=torch.int32),
            (self.cos, self.sin),
        )
        length = ids.shape[1]
        positions = mask.sum(1, keepdim=True) - length + torch.arange(length)
        positions = positions.clamp(min=0)  # of the drawn masks that it is traced with
        with self._attention_replaced():
            scores = self.model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return (scores, *self.calls.present)

    @contextmanager
    def _attention_replaced(self) -> Iterator[None]:
        """Have transformers call :class:`AttentionCalls` until the end of a block."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        module: Any = sys.modules[type(self.model).__module__]
        self.model.config._attn_implementation = ATTENTION
        with ExitStack() as restore:
            ALL_ATTENTION_FUNCTIONS[ATTENTION] = self.calls
            restore.callback(ALL_ATTENTION_FUNCTIONS.__delitem__, ATTENTION)
            if self.cos is not None:
                skip = self.calls.skip_rotary
                restore.enter_context(patched_attribute(module, ROTARY, skip))
            yield


class AttentionCalls:
    """The attention of one call of a decoder: a function that transformers calls in each layer."""

    def __init__(
        self,
        past: list[torch.Tensor] | None = None,
        lengths: torch.Tensor | None = None,
        total: torch.Tensor | None = None,
        rotary: tuple[Any, Any] = (None, None),
    ) -> None:
        self.past, self.lengths, self.total, self.rotary = past, lengths, total, rotary
        self.present: list[torch.Tensor] = []
        self.shapes: dict[int, tuple[int, int, int]] = {}
        """Layer → heads of queries, heads of keys, and size of a head."""
        self.rotary_layers = 0
        """Layers with rotary embeddings that were called so far."""
        self._skipped_rotary = False
        """Whether the attention that is called next has to apply rotary embeddings."""

    def skip_rotary(self, query: Any, key: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Return queries and keys as they are: the attention applies the rotary embeddings."""
        self._skipped_rotary = True
        return query, key

    def __call__(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the attention of a layer, `(batch, length, heads, size)`."""
        batch, heads, length, size = query.shape
        if (
            others.get("s_aux") is not None
            or value.shape != key.shape
            or attention_mask is not None
        ):
            raise StageFailed(
                f"{type(layer).__name__} has attention that GroupQueryAttention does not compute "
                "(sinks, values of another size than keys, or a mask of its own)"
            )
        self.shapes[layer.layer_idx] = (heads, key.shape[1], size)
        is_rotary, self._skipped_rotary = self._skipped_rotary, False
        self.rotary_layers += is_rotary
        if self.past is None:
            return torch.zeros(batch, length, heads, size), None
        cached = self.past[2 * layer.layer_idx : 2 * layer.layer_idx + 2]
        attributes: dict[str, Any] = {
            "num_heads": heads,
            "kv_num_heads": key.shape[1],
            "scale": float(size**-0.5 if scaling is None else scaling),
            **({"local_window_size": sliding_window} if sliding_window else {}),
            **({"softcap": float(softcap)} if softcap else {}),
            **({"do_rotary": 1, "rotary_interleaved": 0} if is_rotary else {}),
        }
        grown = (batch, key.shape[1], cached[0].shape[2] + length, size)
        flat = [x.transpose(1, 2).reshape(batch, length, -1) for x in (query, key, value)]
        tables = self.rotary if is_rotary else ()
        result, *present = torch.onnx.ops.symbolic_multi_out(
            "com.microsoft::GroupQueryAttention",
            (*flat, *cached, self.lengths, self.total, *tables),
            attrs=attributes,
            dtypes=[query.dtype] * 3,
            shapes=[(batch, length, heads * size), grown, grown],
            version=1,
        )
        self.present += present
        return result.view(batch, length, heads, size), None


def _rotary_table(model: Any, context: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return cosines and sines `(context, size / 2)` for `GroupQueryAttention`.

    None where a model's rotary embeddings are not those of this operator, which rotates a head's
    first half against its second one, at each position by angles that all texts share.
    """
    apply_rotary = getattr(sys.modules[type(model).__module__], ROTARY, None)
    embeddings = [m for name, m in model.named_modules() if name.endswith("rotary_emb")]
    if apply_rotary is None or len(embeddings) != 1:
        return None
    if getattr(embeddings[0], "rope_type", "") in ANGLES_BY_LENGTH:
        return None
    if len(inspect.signature(embeddings[0].forward).parameters) != 2:
        return None  # other angles in some layers
    cos, sin = embeddings[0](torch.zeros(1), torch.arange(context)[None])
    size = cos.shape[-1]
    if cos.dim() != 3 or size % ROTARY_MULTIPLE:
        return None
    drawn = torch.randn(1, 1, context, size, generator=torch.Generator().manual_seed(0))
    first, second = drawn.chunk(2, -1)
    half_cos, half_sin = (x[0, :, : size // 2].contiguous() for x in (cos, sin))
    expected = torch.cat(
        [first * half_cos - second * half_sin, second * half_cos + first * half_sin], -1
    )
    try:
        rotated = apply_rotary(drawn, drawn, cos, sin)[0]
    except Exception:  # noqa: BLE001 - of whatever architecture: the angles stay in the graph
        return None
    if rotated.shape != expected.shape or not torch.allclose(rotated, expected, atol=1e-5):
        return None
    return half_cos, half_sin


def lower_decoder(decoder: CachedDecoder, shape: CacheShape) -> ir.Model:
    """Return a decoder in ONNX; raise StageFailed where it cannot be traced or translated."""
    sizes = ("batch", shape.cached_heads, "past_length", shape.head_size)
    each = [(i, part) for i in range(shape.layers) for part in PARTS]
    specs = [
        TensorSpec(name=INPUT_IDS, shape=("batch", "length"), dtype="int64"),
        TensorSpec(name=MASK, shape=("batch", "total_length"), dtype="int64"),
        *(TensorSpec(name=PAST.format(i, part), shape=sizes) for i, part in each),
    ]
    names = (LOGITS, *(PRESENT.format(i, part) for i, part in each))
    signature = Signature(
        inputs=tuple(specs), outputs=tuple(OutputSpec(name=name) for name in names)
    )
    graph = lower(export_program(decoder, signature), signature, None, free_weights=True)
    use_fused_rms_norms_(graph)
    fuse_operators_(graph)
    return graph
