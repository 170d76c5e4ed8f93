"""ONNX operators of recurrence and of spectra."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from compress.graph.from_onnx.registry import Node, Unsupported, operator
from compress.graph.from_onnx.shape_tensor import Value, to_number


@operator("LSTM", "GRU", "RNN")
def _recurrent(node: Node, x: Tensor, w: Tensor, r: Tensor, *rest: Tensor | None) -> Any:
    bias, lengths, hidden, cell, peepholes = (*rest, None, None, None, None, None)[:5]
    if node.get("layout"):
        x = x.transpose(0, 1)
        hidden, cell = (None if s is None else s.transpose(0, 1) for s in (hidden, cell))
    masks: list[Tensor | None] = [None] * len(x)
    if lengths is not None:
        masks = [(t < lengths).unsqueeze(1) for t in range(len(x))]
    steps = [*zip(x, masks, strict=True)]
    way = node.get("direction", "forward")
    outputs, states, cells = [], [], []
    for d in range(w.shape[0]):
        backward = way == "reverse" or d == 1
        b, h, c, p = (None if v is None else v[d] for v in (bias, hidden, cell, peepholes))
        y, h, c = _steps(node, steps[::-1] if backward else steps, w[d], r[d], b, h, c, p, d)
        outputs.append(y.flip(0) if backward else y)
        states.append(h)
        cells.append(c)
    y, h = torch.stack(outputs, 1), torch.stack(states)
    c = None if cells[0] is None else torch.stack(cells)
    if node.get("layout"):
        y, h = y.permute(2, 0, 1, 3), h.transpose(0, 1)
        c = None if c is None else c.transpose(0, 1)
    return (y, h) if c is None else (y, h, c)


DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
"""Operator → activations of its gates where it names none."""
_FUNCTIONS: dict[str, Any] = {
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
    "Relu": F.relu,
    "Softsign": F.softsign,
}


def _steps(
    node: Node,
    steps: Sequence[tuple[Tensor, Tensor | None]],
    w: Tensor,
    r: Tensor,
    b: Tensor | None,
    h: Tensor | None,
    c: Any,
    p: Tensor | None,
    direction: int,
) -> Any:
    size, kind = node.get("hidden_size") or r.shape[-1], node.operator
    x = steps[0][0]
    b = torch.zeros(2 * w.shape[0], dtype=x.dtype) if b is None else b
    h = x.new_zeros(x.shape[0], size) if h is None else h
    default = DEFAULTS[kind]
    names = node.get("activations") or default * 2
    per = len(default)
    chosen = names[direction * per : direction * per + per]
    if missing := [name for name in chosen if name not in _FUNCTIONS]:
        raise Unsupported(f"with activation {missing[0]}")
    functions = [_FUNCTIONS[name] for name in chosen]
    clip = node.get("clip")
    bw, br = b[: w.shape[0]], b[w.shape[0] :]
    if kind == "LSTM":
        c = x.new_zeros(x.shape[0], size) if c is None else c
    rows = []

    def limit(values: Tensor) -> Tensor:
        return values.clamp(-clip, clip) if clip else values

    for step, is_inside in steps:
        before = h, c
        if kind == "RNN":
            h = functions[0](limit(F.linear(step, w, bw) + F.linear(h, r, br)))
        elif kind == "GRU":
            from_x, from_h = F.linear(step, w, bw).chunk(3, -1), None
            rz, rr, rh = r.chunk(3)
            bz, brr, bh = br.chunk(3)
            z = functions[0](limit(from_x[0] + F.linear(h, rz, bz)))
            reset = functions[0](limit(from_x[1] + F.linear(h, rr, brr)))
            if node.get("linear_before_reset"):
                from_h = reset * F.linear(h, rh, bh)
            else:
                from_h = F.linear(reset * h, rh, bh)
            new = functions[1](limit(from_x[2] + from_h))
            h = (1 - z) * new + z * h
        else:
            i, o, f, g = (F.linear(step, w, bw) + F.linear(h, r, br)).chunk(4, -1)
            pi, po, pf = (0, 0, 0) if p is None else p.chunk(3)
            i = functions[0](limit(i + pi * c))
            f = 1 - i if node.get("input_forget") else functions[0](limit(f + pf * c))
            c = f * c + i * functions[1](limit(g))
            o = functions[0](limit(o + po * c))
            h = o * functions[2](c)
        rows.append(h if is_inside is None else h * is_inside)
        if is_inside is not None:  # the states of a row that has ended stay
            h = torch.where(is_inside, h, before[0])
            c = None if c is None else torch.where(is_inside, c, before[1])
    return torch.stack(rows), h, c


def has_default_form(node: Node) -> bool:
    """Whether a recurrent operator has PyTorch's activations and order of axes, and no limits."""
    chosen, default = node.get("activations"), DEFAULTS[node.operator]
    unusual = ("clip", "input_forget", "layout")
    return chosen in (None, default, default * 2) and not any(map(node.get, unusual))


def reordered(tensor: Tensor, order: list[int]) -> Tensor:
    """Return the rows of gates in another order."""
    parts = tensor.chunk(len(order))
    return torch.cat([parts[i] for i in order])


@operator("DFT")
def _dft(node: Node, x: Tensor, length: Value | None = None, axis: Value | None = None) -> Any:
    n = None if length is None else int(to_number(length))
    dim = node.get("axis", 1) if axis is None else to_number(axis)
    dim = dim if dim >= 0 else dim + x.ndim
    is_real = x.shape[-1] == 1
    signal = x[..., 0] if is_real else torch.view_as_complex(x.contiguous())
    one_sided = bool(node.get("onesided"))
    if not node.get("inverse"):
        transform = torch.fft.rfft if one_sided else torch.fft.fft
        return torch.view_as_real(transform(signal, n, dim))
    if one_sided:
        return torch.fft.irfft(signal, n, dim).unsqueeze(-1)
    return torch.view_as_real(torch.fft.ifft(signal, n, dim))


@operator("STFT")
def _stft(
    node: Node,
    x: Tensor,
    step: Value,
    window: Tensor | None = None,
    length: Value | None = None,
) -> Tensor:
    if x.ndim == 3 and x.shape[-1] == 2:
        raise Unsupported("of complex signals")
    signal = x.squeeze(-1) if x.ndim == 3 else x
    size = window.shape[0] if length is None else int(to_number(length))  # type: ignore[union-attr]
    frames = signal.unfold(-1, size, int(to_number(step)))
    frames = frames if window is None else frames * window
    transform = torch.fft.rfft if node.get("onesided", 1) else torch.fft.fft
    return torch.view_as_real(transform(frames, dim=-1))
