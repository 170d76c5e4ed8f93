"""The reference, as Markdown: written at each build, so that none of it can be stale."""

from command_pages import commands_page, exit_codes_page
from gate_page import gates_page
from stage_pages import pipeline_page, stage_pages


def reference() -> dict[str, str]:
    """Return the pages by name."""
    return {
        "pipeline": pipeline_page(),
        **stage_pages(),
        "gates": gates_page(),
        "commands": commands_page(),
        "exit-codes": exit_codes_page(),
    }
