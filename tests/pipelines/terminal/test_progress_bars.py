import io
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from compress.core.progress import progress_bars
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


def test_stage_epoch_and_loss_are_shown_on_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    note = "epoch 3/12 loss 0.508 val accuracy 0.9917 (193 samples/s)"
    with progress_bars(console) as progress:
        progress("prune_channels", 3, 12, note)
    line = next(x for x in console.file.getvalue().splitlines() if "prune_channels" in x)
    assert "epoch 3/12 loss 0.508" in line


def test_a_terminal_says_what_is_imported(finished_run, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    options = ["run", finished_run.file, "--dry-run", "--out", tmp_path]
    command = [sys.executable, "-c", "from compress.cli import main; main()", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, timeout=120)
    os.close(theirs)
    assert done.returncode == 0 and b"train: runs" in done.stdout
    assert os.read(ours, 1000) == b"importing the stages\r\nimporting torch\r\n"
    os.close(ours)
