"""Changes to bytes and to nested values, for Hypothesis to choose."""

from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

ODD_BYTES = (
    b"\0",
    b"\xff",
    b"\x80",
    b"\n",
    b'"',
    b"{",
    b"[",
    b"-",
    b"9" * 30,
    b"\\u0000",
    b"PK\5\6",
)


@st.composite
def changed_bytes(draw: st.DrawFn, content: bytes, pieces: Sequence[bytes] = ODD_BYTES) -> bytes:
    """Return other bytes: one to three flipped, removed, repeated or put in, or a shorter end."""
    changed = content
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(changed)))
        size = draw(st.sampled_from((1, 1, 2, 4, 8, 64)))
        how = draw(st.sampled_from(("flip", "put in", "replace", "remove", "repeat", "cut off")))
        piece = draw(st.one_of(st.sampled_from(pieces), st.binary(min_size=1, max_size=8)))
        if how == "flip" and begin < len(changed):
            byte = changed[begin] ^ (1 << draw(st.integers(0, 7)))
            changed = changed[:begin] + bytes([byte]) + changed[begin + 1 :]
        elif how == "put in":
            changed = changed[:begin] + piece + changed[begin:]
        elif how == "replace":
            changed = changed[:begin] + piece + changed[begin + len(piece) :]
        elif how == "remove":
            changed = changed[:begin] + changed[begin + size :]
        elif how == "repeat":
            changed = changed[: begin + size] + changed[begin:]
        else:
            changed = changed[:begin]
    return changed


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-10, 10),
    st.sampled_from(
        (2**31, 2**63, -(2**63), 10**30, 1e308, -0.0, 1e-320, float("nan"), float("inf"))
    ),
    st.floats(),
    st.sampled_from(
        ("", " ", "batch", "source", "train", "a:b", "../x", "\0", "\x1b[2J", "é" * 300)
    ),
    st.text(max_size=12),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of everything in a nested value."""
    yield here
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, child in children:
        yield from places(child, (*here, key))


@st.composite
def changed_value(draw: st.DrawFn, content: Any, others: Sequence[Any] = ()) -> Any:
    """Return a nested value with one to three parts replaced, removed, renamed or repeated."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(list(places(content))))
        new = draw(st.one_of(scalars, values, *([st.sampled_from(others)] if others else [])))
        how = draw(st.sampled_from(("replace", "replace", "remove", "rename", "repeat")))
        content = _changed(content, place, how, new)
    return content


def _changed(value: Any, place: tuple[Any, ...], how: str, new: Any) -> Any:
    if not place:
        return new if how == "replace" else value
    key, *rest = place
    if rest:
        pairs = {key: _changed(value[key], tuple(rest), how, new)}
        return {**value, **pairs} if isinstance(value, dict) else _with(value, key, [pairs[key]])
    if isinstance(value, dict):
        left = {k: v for k, v in value.items() if k != key}
        if how == "remove":
            return left
        return {
            **left,
            (str(new) if how == "rename" else key): value[key] if how == "rename" else new,
        }
    found = {"remove": [], "repeat": [value[key], value[key]]}.get(how, [new])
    return _with(value, key, found)


def _with(items: list[Any], index: int, found: list[Any]) -> list[Any]:
    return [*items[:index], *found, *items[index + 1 :]]
