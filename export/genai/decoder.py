"""A decoder of transformers with its cache of keys and values as inputs and outputs, in ONNX.

Attention becomes onnxruntime's `GroupQueryAttention`, which appends to the cache and applies the
causal mask and the rotary embeddings.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.pattern import RewriteRule, RewriteRuleSet
from torch import nn

from compress.common.errors import StageFailed
from compress.common.foreign.patching import patched_attribute
from compress.common.forward import batched_experts
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.export.genai.runtime import INPUT_IDS, MASK, CacheShape
from compress.export.onnx.graph import PACKED_MATMUL, add_tensor, producer, remove_unread_, stored
from compress.export.onnx.lowering import lower
from compress.export.onnx.passes.matmul_nbits import (
    ROUNDING_LEVEL,
    gather_block_quantized,
    matmul_nbits,
    matmul_operands,
    pack_pairs,
)
from compress.graph.torch_export import export_program

if TYPE_CHECKING:
    from compress.artifacts.streaming.packed_model import PackedWeight
    from compress.export.common.packed_weights import DecoderWeights


class PackedLinear(nn.Module):
    """A linear layer as `MatMulNBits`."""

    blocks: torch.Tensor
    scale: torch.Tensor
    zeros: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, level: int) -> None:
        super().__init__()
        parts = (weight.packed, weight.scale, weight.zero_point, weight.bits)
        for name, tensor in zip(("blocks", "scale", "zeros"), matmul_operands(*parts), strict=True):
            self.register_buffer(name, tensor)
        self.register_buffer("bias", bias)
        self.bits, self.group_size, self.level = weight.bits, weight.group_size, level

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the product, and the bias added."""
        sizes = (self.bits, self.group_size, self.level)
        product = matmul_nbits(features, self.blocks, self.scale, self.zeros, *sizes)
        return product if self.bias is None else product + self.bias


class PackedTable(nn.Module):
    """An embedding, or the matrices of experts, dequantized where some are looked up."""

    rows: torch.Tensor
    scale: torch.Tensor
    zeros: torch.Tensor

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__()
        zeros = pack_pairs(weight.zero_point) if weight.bits == 4 else weight.zero_point
        self.register_buffer("rows", weight.packed)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("zeros", zeros)
        self.bits, self.group_size = weight.bits, weight.group_size

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of some ids, or the matrices of some experts."""
        if self.bits == 4:
            return gather_block_quantized(self.rows, ids, self.scale, self.zeros, self.group_size)
        rows, scale, zeros = (x[ids] for x in (self.rows, self.scale, self.zeros))
        if self.rows.dim() == 2:
            return (rows.float() - zeros.float()) * scale
        centred = rows.view(*scale.shape, -1).float() - zeros.float()[..., None]
        dequantized: torch.Tensor = (centred * scale[..., None]).flatten(-2)
        return dequantized

    __getitem__ = forward  # as transformers reads the parameter of experts that it stands for


def use_packed_layers_(weights: DecoderWeights) -> None:
    """Replace a module's linear layers, tables and experts whose weights are packed, in place."""
    level = ROUNDING_LEVEL if weights.rounds_activations else 0
    layers = dict(weights.module.named_modules(remove_duplicate=False))
    for (parameter, is_table), weight in weights.packed.items():
        name, _, key = parameter.rpartition(".")
        layer: Any = layers[name]
        if weight.packed.dim() == 3:
            delattr(layer, key)
            setattr(layer, key, PackedTable(weight))
        # A table of another class, as Gemma's, may scale what it looks up.
        elif is_table and type(layer) is nn.Embedding:
            weights.module.set_submodule(name, PackedTable(weight))
        elif not is_table and isinstance(layer, nn.Linear):
            weights.module.set_submodule(name, PackedLinear(weight, layer.bias, level))
        elif is_table == isinstance(layer, nn.Embedding):
            # Such as the router of a mixture of experts, which is called in its own way.
            layer.weight = nn.Parameter(weight.dequantized(), requires_grad=False)


GROUP_QUERY_ATTENTION = "GroupQueryAttention"
SKIP_NORM = "SkipSimplifiedLayerNormalization"
"""Adds to the residual stream and normalizes the sum; its fourth output is the sum."""


def fuse_operators_(model: ir.Model) -> None:
    """Fuse what stands around attention and norms, in place, by the shapes that were exported."""
    # A value that is reshaped, and then reshaped back, is read itself.
    for node in model.graph:
        for place, value in enumerate(node.inputs):
            source, shape = value, _shape(value)
            while (reshape := producer(source, "Reshape")) is not None:
                source = reshape.inputs[0]
                if shape and all(shape) and shape == _shape(source):
                    node.replace_input_with(place, source)
    remove_unread_(model)
    join_projections_(model.graph)
    for pattern, replacement in ((_by_reciprocal, _by_division), (_norm_of_sum, _added_in_norm)):
        rewrite(model, RewriteRuleSet([RewriteRule(pattern, replacement)], commute=True))


def join_projections_(graph: ir.Graph) -> None:
    """Compute queries, keys and values of a few bits by one product, where one is attended."""
    for attention in [node for node in graph if node.op_type == GROUP_QUERY_ATTENTION]:
        parts = [p for v in attention.inputs[:3] if (p := producer(v, PACKED_MATMUL)) is not None]
        if len(parts) < 3 or any(len(part.outputs[0].uses()) > 1 for part in parts):
            continue
        sizes = [{name: a.as_int() for name, a in part.attributes.items()} for part in parts]
        outputs = sum(size.pop("N") for size in sizes)
        kinds = [(p.inputs[0], len(p.inputs), size) for p, size in zip(parts, sizes, strict=True)]
        if any(kind != kinds[0] for kind in kinds):
            continue
        operands = [parts[0].inputs[0]]
        for values in zip(*(part.inputs[1:] for part in parts), strict=True):
            arrays = [tensor.numpy() for value in values if (tensor := stored(value)) is not None]
            name = values[0].name if values[0] is not None else ""
            operands.append(add_tensor(graph, f"{name}_joined", np.concatenate(arrays)))
        made = ir.node(
            PACKED_MATMUL,
            operands,
            dict(sorted({**sizes[0], "N": outputs}.items())),
            domain=parts[0].domain,
            outputs=[ir.Value(name=f"{parts[0].outputs[0].name}_joined")],
        )
        # In the place of the first one: nothing else reads what it gave.
        graph.insert_before(next(node for node in graph if node in parts), made)
        for place, value in enumerate((made.outputs[0], None, None)):
            attention.replace_input_with(place, value)


def _by_reciprocal(op: Any, x: Any, root: Any) -> Any:
    return op.Mul(x, op.Reciprocal(root))


def _by_division(op: Any, x: ir.Value, root: ir.Value) -> Any:
    """Divide by a square root instead of multiplying with its reciprocal.

    The exporter writes `rsqrt` as Reciprocal of Sqrt. onnxruntime 1.32 fuses a norm to
    SimplifiedLayerNormalization only where it divides; apart, a norm is seven kernels.
    """
    return op.Div(x, root) if producer(root, "Sqrt") is not None else None


def _norm_of_sum(op: Any, x: Any, y: Any, weight: Any, epsilon: Any) -> Any:
    """Return the pattern of an RMS norm of what is added to the residual stream, and of the sum."""
    stream = op.Add(x, y)
    mean = op.ReduceMean(op.Pow(stream, 2.0), _allow_other_inputs=True, _outputs=["mean"])
    return op.Mul(op.Div(stream, op.Sqrt(op.Add(mean, epsilon))), weight), stream


def _added_in_norm(
    op: Any, x: ir.Value, y: ir.Value, weight: ir.Value, epsilon: ir.Value, mean: ir.Value
) -> Any:
    """Let a norm add to the residual stream what it normalizes."""
    shape, number = _shape(x), _number(epsilon)
    is_over_features = len(shape) == 3 and _shape(mean) == (*shape[:2], 1)
    is_scaled = stored(weight) is not None and _shape(weight) == shape[2:]
    if not (is_over_features and is_scaled) or _shape(y) != shape or number is None:
        return None
    options = {"epsilon": number, "_domain": "com.microsoft", "_outputs": 4}
    norm, _, _, stream = getattr(op, SKIP_NORM)(x, y, weight, **options)
    return norm, stream


def _shape(value: ir.Value | None) -> tuple[int | str | None, ...]:
    """Return a value's sizes, by name where they are not fixed; none where none is known."""
    tensor = stored(value)
    shape = tensor.shape if tensor is not None else None if value is None else value.shape
    return tuple(d if isinstance(d, int) else d.value for d in shape) if shape is not None else ()


def _number(value: ir.Value | None) -> float | None:
    tensor = stored(value)
    return float(tensor.numpy().item()) if tensor is not None and tensor.size == 1 else None


ATTENTION = "group_query_attention"
"""Name under which :class:`AttentionCalls` is registered while a decoder is traced."""
ROTARY = "apply_rotary_pos_emb"
"""Function of transformers' modules that applies rotary embeddings to queries and keys."""
ROTARY_MULTIPLE = 16  # onnxruntime's rotary embeddings take heads whose size is a multiple of this
ANGLES_BY_LENGTH = ("dynamic", "longrope")
"""Types of rotary embeddings whose angles depend on the length of the text."""


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
        with batched_experts(), ExitStack() as restore:
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
        self.rotary_layers = 0  # layers with rotary embeddings that were called so far
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
    each = [(i, part) for i in range(shape.layers) for part in ("key", "value")]
    names = ("logits", *(f"present.{i}.{part}" for i, part in each))
    signature = Signature(
        inputs=(
            TensorSpec(name=INPUT_IDS, shape=("batch", "length"), dtype="int64"),
            TensorSpec(name=MASK, shape=("batch", "total_length"), dtype="int64"),
            *(TensorSpec(name=f"past_key_values.{i}.{part}", shape=sizes) for i, part in each),
        ),
        outputs=tuple(OutputSpec(name=name) for name in names),
    )
    graph = lower(export_program(decoder, signature), signature, None, free_weights=True)
    fuse_operators_(graph)
    return graph
