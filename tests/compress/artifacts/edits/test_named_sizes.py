import ast
import copy

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from compress.artifacts.edits import named_sizes
from compress.artifacts.edits.named_sizes import NamedCall
from compress.artifacts.recipe import NameSizes
from compress.common.errors import ArtifactInvalid

BETWEEN = 2


class Base(nn.Module):
    def fold(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
        """Doubles."""
        return x * times


class Net(Base):
    """Uses what a copied function must still reach: a closure, a global, a default, super()."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)

    def fold(self, x: torch.Tensor, times: int = 3) -> torch.Tensor:
        """Folds."""
        y = self.inner(x)
        first, rest = y[..., :BETWEEN], y[..., BETWEEN:]
        halves = torch.reshape(super().fold(y), (len(x), 2, 3)).chunk(2, dim=1)
        folded = [part.reshape(len(x), 3) for part in halves]
        return torch.cat([first, rest, *folded], 1) * times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fold(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.other = Net(), Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) + self.other(x)


CALLS = (
    NamedCall(method="fold", source="y[..., :BETWEEN]", attributes={0: "slice_size_0"}),
    NamedCall(method="fold", source="y[..., BETWEEN:]", attributes={0: "slice_size_1"}),
    NamedCall(
        method="fold",
        source="torch.reshape(super().fold(y), (len(x), 2, 3))",
        attributes={2: "reshape_size_2"},
    ),
    NamedCall(
        method="fold",
        source="torch.reshape(super().fold(y), (len(x), 2, 3)).chunk(2, dim=1)",
        attributes={0: "chunk_sizes_3"},
    ),
)
SIZES = {"slice_size_0": 2, "slice_size_1": 2, "reshape_size_2": 3, "chunk_sizes_3": (1, 1)}


def named() -> tuple[Outer, Outer]:
    torch.manual_seed(0)
    plain = Outer()
    changed = copy.deepcopy(plain)
    NameSizes(calls=CALLS, sizes={"net": SIZES}).apply_(changed)
    return plain, changed


def test_a_module_computes_the_same_from_attributes() -> None:
    plain, changed = named()
    x = torch.randn(5, 4)
    torch.testing.assert_close(changed(x), plain(x), rtol=0, atol=0)
    torch.testing.assert_close(copy.deepcopy(changed)(x), plain(x), rtol=0, atol=0)
    assert changed.net.fold(x, times=1).shape == (5, 12)
    assert (changed.net.slice_size_0, changed.net.chunk_sizes_3) == (2, (1, 1))
    assert isinstance(changed.net, Net) and str(type(changed.net)) == str(Net)
    assert type(changed.net).fold.__doc__ == "Folds."
    assert changed.state_dict().keys() == plain.state_dict().keys()


def test_attributes_are_what_the_code_uses() -> None:
    _, changed = named()
    x = torch.randn(5, 4)
    changed.net.slice_size_0, changed.net.slice_size_1 = 1, 4
    assert changed.net(x).shape == (5, 1 + 2 + 6)
    changed.net.reshape_size_2 = 2
    with pytest.raises(RuntimeError, match=r"shape '\[5, 2, 2\]' is invalid"):
        changed.net(x)


def test_other_modules_of_the_class_stay() -> None:
    _, changed = named()
    assert type(changed.other) is Net and not hasattr(changed.other, "slice_size_0")


def test_sizes_are_named_again_in_what_was_named_before() -> None:
    plain, changed = named()
    again = NamedCall(
        method="fold", source="part.reshape(len(x), 3)", attributes={1: "reshape_size_4"}
    )
    NameSizes(calls=(again,), sizes={"net": {"reshape_size_4": 3}}).apply_(changed)
    x = torch.randn(5, 4)
    torch.testing.assert_close(changed(x), plain(x), rtol=0, atol=0)
    assert type(changed.net).named_sizes == (*SIZES, "reshape_size_4")
    changed.net.reshape_size_4 = 1
    with pytest.raises(RuntimeError, match=r"shape '\[5, 1\]' is invalid"):
        changed.net(x)


def test_code_that_was_changed_is_refused() -> None:
    call = NamedCall(method="fold", source="x.view(1, 2)", attributes={0: "view_size_0"})
    with pytest.raises(ArtifactInvalid, match=r"Net\.fold: expected the call 'x\.view\(1, 2\)'"):
        NameSizes(calls=(call,), sizes={"net": {"view_size_0": 1}}).apply_(Outer())
    call = NamedCall(method="relu", source="x.view(1, 2)", attributes={0: "view_size_0"})
    with pytest.raises(ArtifactInvalid, match=r"Net\.relu: its source is not there"):
        NameSizes(calls=(call,), sizes={"net": {"view_size_0": 1}}).apply_(Outer())


@pytest.mark.parametrize("name", ["size", "view_size_0)", "view_size_0, print()", "forward"])
def test_names_that_could_be_other_code_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="String should match pattern"):
        NamedCall(method="fold", source="y[..., :BETWEEN]", attributes={0: name})
    with pytest.raises(ValidationError, match="String should match pattern"):
        NameSizes(calls=(), sizes={"net": {name: 1}})


@pytest.mark.parametrize(
    ("source", "sizes"),
    [
        ("x.view(b, 4, c)", ["b", "4", "c"]),
        ("x.view((b, -1))", ["b", "-1"]),
        ("torch.reshape(x, [b, c])", ["b", "c"]),
        ("x.unflatten(-1, (h, c // h))", ["h", "c // h"]),
        ("x.split(c, dim=2)", ["c"]),
        ("torch.split(x, [a, b], -1)", ["[a, b]"]),
        ("x[..., a:]", ["a"]),
        ("x[:, a:b]", ["a", "b"]),
        ("x.view(shape)", None),
        ("x.view(*shape)", None),
        ("x.view(*shape, c)", ["*shape", "c"]),
        ("x.reshape(shape=(b, c))", None),
        ("x[0, a:b]", None),
        ("x[:]", None),
        ("x.chunk(*parts)", None),
        ("x.flatten(2)", None),
        ("view(x, 2)", None),
    ],
)
def test_sizes_are_found_in_the_source(source: str, sizes: list[str] | None) -> None:
    expression = ast.parse(source, mode="eval").body
    found = named_sizes.sizes_of(expression)
    assert (found and [ast.unparse(size) for size in found]) == sizes
