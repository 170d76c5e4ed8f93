"""Widths that a search tries are selected as those of the stage that it writes."""

from compress.pipelines.config.auto_settings import WidthSettings


def test_a_search_selects_channels_as_the_stage_does() -> None:
    widths = WidthSettings(round_to=8, include=("body",), across_norms=True, values=3)
    own = widths.model_dump(
        include={"round_to", "importance", "include", "exclude", "across_norms"}
    )
    selected = widths.selection.model_dump()
    assert {name: selected[name] for name in own} == own
    assert selected["scope"] == "uniform" and selected["on_unverified"] == "pin"
