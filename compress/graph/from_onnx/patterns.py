"""Patterns of several ONNX operators that are one operator, or one layer, in PyTorch."""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, ShapeInferencePass
from onnxscript.rewriter import rewrite
from onnxscript.rewriter.pattern import OrValue, RewriteRule, RewriteRuleSet, Var

FLOATS = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}
Rule = tuple[Callable[..., Any], Callable[..., Any]]
"""Pattern, and a function of what it matched that returns the replacement, or None to leave it."""


def fuse(model: ir.Model) -> None:
    """Fuse activations, norms, attention and biases that take several operators, in place.

    The result is for this importer alone: norms may lack weights, products have biases, and
    attention is PyTorch's `ScaledDotProductAttention`, as ONNX's has many forms.
    """
    ShapeInferencePass()(model)
    CommonSubexpressionEliminationPass()(model)
    _sort_operands(model)
    rewrite(model, _rules())


@cache
def _rules() -> RewriteRuleSet:
    pairs = (*_activations(), *_norms(), *_attention(), *_biases(), *_scales())
    return RewriteRuleSet([RewriteRule(pattern, replace) for pattern, replace in pairs])


def _sort_operands(model: ir.Model) -> None:
    """Put the operand that is computed first before the other, constants last, in place.

    The order is each exporter's own; so a pattern needs one form alone.
    """
    order: dict[Any, float] = {}
    for place, node in enumerate(model.graph.all_nodes()):
        order |= dict.fromkeys(node.outputs, place)
        if node.op_type in ("Add", "Mul") and not node.domain:
            x, y = node.inputs
            first, second = (math.inf if _is_held(v) else order.get(v, -1) for v in (x, y))
            if first > second:
                node.replace_input_with(0, y)
                node.replace_input_with(1, x)


def _is_held(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None


def _number(value: ir.Value | None) -> Any:
    """Return the number that a constant of one element holds; None for others."""
    tensor = None if value is None else value.const_value
    return tensor.numpy().item() if tensor is not None and tensor.size == 1 else None


def _near(number: float) -> Var:
    """Return the pattern of a constant of one element, of any rank, with about this number."""

    def is_near(context: Any, value: ir.Value) -> bool:
        found = _number(value)
        return found is not None and math.isclose(found, number, rel_tol=1e-5)

    return Var(None, check=is_near)


def _changed(op: Any, node: ir.Node, *inputs: Any) -> Any:
    """Return the output of an operator of the same name and attributes, with other inputs."""
    output = getattr(op, node.op_type)(*inputs, **node.attributes)
    output.producer().name = node.name
    return output


def _activations() -> Iterator[Rule]:
    def clip(op: Any, x: Any) -> Any:
        return op.Clip(op.Add(x, _near(3.0)), _allow_other_inputs=True, _outputs=["clip"])

    def is_relu6(clip: ir.Value) -> bool:
        node: Any = clip.producer()
        given = [node.attributes.get_float(key, None) for key in ("min", "max")]
        return ([_number(v) for v in node.inputs[1:]] or given) == [0, 6]

    def hard_swish(op: Any, x: Any, clip: ir.Value) -> Any:
        return op.HardSwish(x) if is_relu6(clip) else None

    def hard_sigmoid(op: Any, x: Any, clip: ir.Value) -> Any:
        return op.HardSigmoid(x, alpha=1 / 6, beta=0.5) if is_relu6(clip) else None

    def gated(op: Any, x: Any, gate: ir.Value) -> Any:
        found: Any = gate.producer().attributes  # type: ignore[union-attr]
        slope, shift = found.get_float("alpha", 0.2), found.get_float("beta", 0.5)
        return op.HardSwish(x) if abs(slope - 1 / 6) < 1e-6 and shift == 0.5 else None

    yield lambda op, x: op.Div(op.Mul(x, clip(op, x)), _near(6.0)), hard_swish
    yield lambda op, x: op.Mul(op.Mul(x, clip(op, x)), _near(1 / 6)), hard_swish
    yield lambda op, x: op.Div(clip(op, x), _near(6.0)), hard_sigmoid
    yield lambda op, x: op.Mul(clip(op, x), _near(1 / 6)), hard_sigmoid
    yield lambda op, x: op.Mul(x, op.HardSigmoid(x, _outputs=["gate"])), gated

    def erf(op: Any, x: Any) -> Any:
        return op.Erf(OrValue([op.Div(x, _near(math.sqrt(2))), op.Mul(x, _near(math.sqrt(0.5)))]))

    def tanh(op: Any, x: Any) -> Any:
        factor = _near(0.044715)
        cube = OrValue([op.Pow(x, _near(3.0)), op.Mul(x, op.Mul(x, x))])
        cube = OrValue([op.Mul(cube, factor), op.Mul(x, op.Mul(x, op.Mul(x, factor)))])
        return op.Tanh(op.Mul(op.Add(x, cube), _near(math.sqrt(2 / math.pi))))

    def gelu(inner: Callable[..., Any], form: str) -> Iterator[Rule]:
        def replace(op: Any, x: Any) -> Any:
            return op.Gelu(x, approximate=form)

        def more(op: Any, x: Any) -> Any:
            return op.Add(inner(op, x), _near(1.0))

        yield lambda op, x: op.Mul(op.Mul(x, more(op, x)), _near(0.5)), replace
        yield lambda op, x: op.Mul(x, op.Mul(more(op, x), _near(0.5))), replace
        yield lambda op, x: op.Mul(op.Mul(x, _near(0.5)), more(op, x)), replace
        yield lambda op, x: op.Mul(more(op, x), op.Mul(x, _near(0.5))), replace

    yield from gelu(erf, "none")
    yield from gelu(tanh, "tanh")
    # What ONNX Runtime writes when it optimizes a file.
    yield (lambda op, x: op.Gelu(x, _domain="com.microsoft")), lambda op, x: op.Gelu(x)


def _norms() -> Iterator[Rule]:
    def reduced(op: Any, x: Any, name: str) -> Any:
        return op.ReduceMean(x, _allow_other_inputs=True, _outputs=[name])

    def root(op: Any, x: Any, epsilon: Any) -> Any:
        square = OrValue([op.Pow(x, _near(2.0)), op.Mul(x, x)])
        return op.Sqrt(op.Add(reduced(op, square, "variance"), epsilon))

    def divided(op: Any, x: Any, epsilon: Any) -> Any:
        return op.Div(x, root(op, x, epsilon))

    def multiplied(op: Any, x: Any, epsilon: Any) -> Any:
        found = root(op, x, epsilon)
        return op.Mul(x, OrValue([op.Reciprocal(found), op.Div(_near(1.0), found)]))

    def centred(op: Any, x: Any) -> Any:
        return op.Sub(x, reduced(op, x, "mean"))

    def normed(op: Any, x: Any, epsilon: Any, **reductions: ir.Value) -> Any:
        axis, least = _first_axis(x, *reductions.values()), _number(epsilon)
        kind = op.LayerNormalization if "mean" in reductions else op.RMSNormalization
        return kind(x, axis=axis, epsilon=least) if axis and least else None

    yield lambda op, x, epsilon: divided(op, centred(op, x), epsilon), normed
    yield lambda op, x, epsilon: multiplied(op, centred(op, x), epsilon), normed
    yield divided, normed
    yield multiplied, normed

    def affine(op: Any, x: Any, y: ir.Value, given: ir.Value, weight: Any = None) -> Any:
        node: Any = y.producer()
        sizes = [] if given.shape is None else [*given.shape]
        fits = len(sizes) == -node.attributes.get_int("axis", -1) and 1 not in sizes
        if not fits or not _is_held(given):
            return None
        return _changed(op, node, *(v for v in (x, weight, given) if v is not None))

    def norm(name: str) -> Callable[..., Any]:
        return lambda op, x, given: op.Mul(getattr(op, name)(x, _outputs=["y"]), given)

    yield norm("LayerNormalization"), affine
    yield norm("RMSNormalization"), affine
    yield (
        lambda op, x, weight, given: op.Add(
            op.LayerNormalization(x, weight, _outputs=["y"]), given
        ),
        affine,
    )


def _first_axis(x: ir.Value, *reductions: ir.Value) -> int | None:
    """Return -n if all reductions are over the last n axes, and keep them; None otherwise."""
    found = set()
    for value in reductions:
        node: Any = value.producer()
        axes = node.attributes.get_ints("axes", None)
        for given in filter(_is_held, node.inputs[1:]):  # where operator set 18 has them
            axes = given.const_value.numpy().tolist()
        if not axes or not node.attributes.get_int("keepdims", 1):
            return None
        rank = 0 if x.shape is None else x.shape.rank()
        last = sorted(axis - rank if axis >= 0 else axis for axis in axes)
        found.add(-len(last) if last == [*range(-len(last), 0)] else 0)
    return found.pop() or None if len(found) == 1 else None


def _attention() -> Iterator[Rule]:
    def weights(op: Any, scores: Any) -> Any:
        return op.Softmax(scores, _outputs=["weights"])

    def guarded(op: Any, scores: Any) -> Any:
        found = weights(op, scores)
        return OrValue([found, op.Where(op.IsNaN(found), _near(0.0), found)])

    yield lambda op, scores, value: op.MatMul(guarded(op, scores), value), _fused_attention
    yield (
        lambda op, query, key, value: op.Attention(
            query, key, value, _allow_other_inputs=True, _outputs=["y"]
        ),
        _simple_attention,
    )


def _fused_attention(op: Any, scores: ir.Value, value: ir.Value, weights: ir.Value) -> Any:
    """Replace `MatMul(Softmax(scores), value)` where the scores are a scaled, masked product."""
    add: Any = scores.producer()
    candidates: list[tuple[Any, ...]] = [(scores,)]
    if add is not None and add.op_type == "Add":
        candidates = [tuple(add.inputs), tuple(reversed(add.inputs))]
    for product, *mask in candidates:
        unscaled, scale = _without_scale(product)
        if (node := unscaled.producer()) is None or node.op_type != "MatMul":
            continue
        (query, by_query), (key, by_key) = map(_without_scale, node.inputs)
        ranks = {v.shape.rank() for v in (weights, query, key, value) if v.shape is not None}
        perm, transpose = None, key.producer()
        if transpose is not None and transpose.op_type == "Transpose":
            perm = transpose.attributes.get_ints("perm", None)
        if transpose is not None and perm:
            key, by_source = _without_scale(transpose.inputs[0])
            by_key, ranks = by_key * by_source, ranks | {len(perm)}
        axis = weights.producer().attributes.get_int("axis", 0)  # type: ignore[union-attr]
        if len(ranks) != 1 or (rank := ranks.pop()) not in (3, 4) or axis not in (-1, rank - 1):
            continue  # torch's exporter (2.13) has no attention of five axes
        if not all(_broadcasts(v.shape, product.shape) for v in mask):
            continue
        *outer, row, column = perm or range(rank)
        if (turned := [*outer, column, row]) != [*range(rank)]:  # the product reads keys transposed
            key = op.Transpose(key, perm=turned)
        scale *= by_query * by_key
        return op.ScaledDotProductAttention(query, key, value, *mask, scale=scale)
    return None


def _broadcasts(shape: ir.Shape | None, other: ir.Shape | None) -> bool:
    """Whether a mask has axes and is expanded to scores, as far as is known: never the scores."""
    if shape is None or other is None:
        return shape is None or shape.rank() > 0
    pairs = zip(reversed([*shape]), reversed([*other]), strict=False)
    fits = all(m in (1, n) or not (isinstance(m, int) and isinstance(n, int)) for m, n in pairs)
    return 0 < shape.rank() <= other.rank() and fits


def _without_scale(value: Any) -> tuple[Any, float]:
    """Return what a value is a multiple of, and the factor."""
    node = value.producer()
    is_scaled = node is not None and node.op_type in ("Mul", "Div")
    if not is_scaled or not (factor := _number(node.inputs[1])):
        return value, 1.0
    inner, scale = _without_scale(node.inputs[0])
    return inner, scale * factor if node.op_type == "Mul" else scale / factor


def _simple_attention(op: Any, y: ir.Value, query: ir.Value, key: ir.Value, value: ir.Value) -> Any:
    """Replace ONNX's Attention in the form that PyTorch has: four axes, and no earlier keys."""
    node: Any = y.producer()
    shapes: list[Any] = [v.shape for v in (query, key, value)]
    if any(shape is None or shape.rank() != 4 for shape in shapes) or len(node.outputs) > 1:
        return None
    options = {name: a.value for name, a in node.attributes.items() if a.value}
    mask = [v for v in node.inputs[3:] if v is not None]
    is_plain = len({shape[1] for shape in shapes}) == 1 and mask == [*node.inputs[3:4]]
    if not is_plain or not options.keys() <= ({"scale"} if mask else {"scale", "is_causal"}):
        return None
    return op.ScaledDotProductAttention(query, key, value, *mask, **options)


def _biases() -> Iterator[Rule]:
    def biased(op: Any, x: ir.Value, weight: ir.Value, bias: ir.Value, y: ir.Value) -> Any:
        node: Any = y.producer()
        if not (_is_held(weight) and _is_held(bias)) or weight.shape is None or bias.shape is None:
            return None
        is_conv, sizes, shape = node.op_type == "Conv", [*weight.shape], [*bias.shape]
        if not is_conv and (len(sizes) != 2 or weight.dtype not in FLOATS):
            return None
        tail = [sizes[0], *[1] * (len(sizes) - 2)] if is_conv else sizes[1:]
        leading = len(shape) - len(tail)
        if leading < 0 or shape != [1] * leading + tail:
            return None
        rank = len(sizes) if is_conv else 2 if x.shape is None else x.shape.rank()
        return _changed(op, node, x, weight, bias) if len(shape) <= rank else None

    def layer(name: str) -> Callable[..., Any]:
        return lambda op, x, weight, bias: op.Add(
            getattr(op, name)(x, weight, _outputs=["y"]), bias
        )

    yield layer("Conv"), biased
    yield layer("MatMul"), biased


def _scales() -> Iterator[Rule]:
    """Fold numbers before and after a convolution into it, so that integers need no float steps."""

    def conv(op: Any, x: Any) -> Any:
        return op.Conv(x, _allow_other_inputs=True, _outputs=["y"])

    def folded(op: Any, x: ir.Value, y: ir.Value, **found: ir.Value) -> Any:
        """Return `gain * conv(scale * x + shift) + offset` as a convolution of x, or None."""
        numbers = {"scale": 1, "shift": 0, "gain": 1, "offset": 0}
        numbers |= {name: _number(value) for name, value in found.items()}
        node: Any = y.producer()
        held = [value for value in node.inputs[1:] if value is not None]
        weights = [value.const_value for value in held if len(value.uses()) == 1]
        if None in (*numbers.values(), *weights) or len(weights) < len(held):
            return None
        scale, shift, gain, offset = numbers.values()
        is_padded = any(node.attributes.get_ints("pads", [])) or "auto_pad" in node.attributes
        if (len(held) == 1 and (shift or offset)) or (shift and is_padded and scale in (0, 1)):
            return None
        if shift and is_padded:  # the cells around an image stay zero
            moved = ir.tensor([shift / scale], dtype=held[0].dtype)
            x, shift = op.Add(x, op.Constant(value=moved)), 0
        kernel, *biases = (tensor.numpy().astype("float64") for tensor in weights)
        sums = kernel.reshape(len(kernel), -1).sum(1)
        contents = [kernel * scale * gain, *((b + shift * sums) * gain + offset for b in biases)]
        for value, old, content in zip(held, weights, contents, strict=True):
            new = content.astype(old.numpy().dtype)
            value.const_value = ir.tensor(new, dtype=old.dtype, name=value.name)
        return _changed(op, node, x, *held)

    yield lambda op, x, gain: op.Mul(conv(op, x), gain), folded
    yield lambda op, x, offset: op.Add(conv(op, x), offset), folded
    yield lambda op, x, scale, shift: conv(op, op.Add(op.Mul(x, scale), shift)), folded
    yield lambda op, x, scale: conv(op, op.Mul(x, scale)), folded
    yield lambda op, x, shift: conv(op, op.Add(x, shift)), folded
