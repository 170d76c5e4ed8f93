import logging

import pytest

from compress.pipelines.terminal.console import OutputMode, show_progress, use_mode

OWN = logging.getLogger("compress.training.fit")


@pytest.fixture
def root_level():
    """Return what sets the root's level, which the command line sets to ERROR."""
    root = logging.getLogger()
    before = root.level
    yield root.setLevel
    root.setLevel(before)


def test_the_toolkits_warnings_are_lines_of_the_run(capfd, root_level) -> None:
    root_level(logging.ERROR)
    with show_progress():
        OWN.warning("rank %d was ended", 1)
        OWN.info("a detail")
        logging.getLogger("somebody.else").warning("nothing to see")
    OWN.warning("after the run")
    out, err = capfd.readouterr()
    assert out == "" and "warning: rank 1 was ended\n" in err
    assert "detail" not in err and "warning: nothing" not in err and "warning: after" not in err


def test_a_quiet_run_has_no_lines(capfd) -> None:
    with use_mode(OutputMode(quiet=True)), show_progress() as (progress, announce):
        progress("train", 1, 2)
        announce("a line")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("level", [logging.DEBUG, logging.WARNING])
def test_a_log_that_is_shown_is_not_shown_twice(capfd, root_level, level) -> None:
    root_level(level)
    with show_progress():
        OWN.warning("once")
    assert "warning: once" not in capfd.readouterr().err
