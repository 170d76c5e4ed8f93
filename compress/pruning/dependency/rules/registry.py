"""The rule of each operator, by name; a package or a user's module registers rules of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.pruning.dependency.rules import elementwise, layers

if TYPE_CHECKING:
    from compress.pruning.dependency.rules.op_call import Rule

RULES: dict[str, Rule] = {**layers.RULES, **elementwise.RULES}
"""ATen operators by their bare name (`conv2d`), others with their namespace (`mylib::scale`)."""


def register_rule(operator: str, rule: Rule) -> None:
    """Set the rule of an operator, whose name has a namespace, such as `mylib::scale`."""
    RULES[rule_key(operator)] = rule


def rule_key(operator: str) -> str:
    """Return the key of an operator in :data:`RULES`, without the underscore of its in-place form.

    The namespace of other operators stays: `mylib::softmax` may couple other channels than ATen's.
    """
    return operator.removeprefix("aten::").rstrip("_")
