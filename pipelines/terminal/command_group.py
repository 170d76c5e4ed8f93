"""How the commands' options are parsed."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class CommandGroup(TyperGroup):
    """The commands; absent flags of `compress` itself are False rather than None."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options that are parsed before the command's name.

        typer validates None with pydantic, whose import takes longer than all else that
        `compress run --help` does.
        """
        found = super().get_params(ctx)
        for option in found:
            if getattr(option, "is_flag", False) and option.default is None:
                option.default = False
        return found
