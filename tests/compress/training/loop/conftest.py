"""Event files whose names sort in the order in which they are opened."""

import pytest


@pytest.fixture
def ordered_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count files from 0: TensorBoard reads those of one second by name, and 9 comes after 10."""
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.summary.writer import event_file_writer

    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
