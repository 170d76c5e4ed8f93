"""Events of a run, and `log.jsonl`: log records with structured fields, one JSON object a line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from compress.common.printable import escaped_json

LOG = "log.jsonl"
MAX_LOG_BYTES = 8 * 2**20  # size at which the log rotates to `log.jsonl.1`; older lines are dropped
LOGGER = "compress"
log = logging.getLogger(__name__)


def log_event(event: str, message: str, **fields: Any) -> None:
    """Log an event with structured fields; :func:`log_handler` attaches the receivers."""
    log.info("%s", message, extra={"log_fields": {"event": event, **fields}})


@contextmanager
def log_handler(handler: logging.Handler) -> Iterator[None]:
    """Attach a handler for the toolkit's records from INFO on; others receive no more."""
    logger = logging.getLogger(LOGGER)
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    threshold = logger.getEffectiveLevel()
    logger.addHandler(handler)
    if threshold > logging.INFO:
        logger.setLevel(logging.INFO)
        if logger.propagate:
            logger.propagate = False
            # The root logger goes on to receive what it received at the old level.
            logger.addHandler(_ToRoot(threshold))
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.propagate, logger.handlers[:] = propagate, handlers
        handler.close()


class _ToRoot(logging.Handler):
    """Passes records on to the root logger from the level that it had without the handler."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger().callHandlers(record)


class LogFile(RotatingFileHandler):
    """Appends events to a file, each as a whole line; if writing fails, the run goes on."""

    def __init__(self, file: Path, run: str, stage: Callable[[], str]) -> None:
        """Open the log of a run's id; `stage` returns the name of the running stage."""
        # `delay`: it is opened with the first record, once a torn last line was removed.
        super().__init__(file, maxBytes=MAX_LOG_BYTES, backupCount=1, encoding="utf-8", delay=True)
        self.file, self.run, self.stage = file, run, stage
        self.is_broken = False

    def emit(self, record: logging.LogRecord) -> None:
        """Append a record."""
        if not self.is_broken:
            # No file yet, or an unwritable one: then emitting the first record warns.
            with suppress(OSError):
                if self.stream is None and not (content := self.file.read_bytes()).endswith(b"\n"):
                    with self.file.open("r+b") as stream:
                        stream.truncate(content.rfind(b"\n") + 1)  # a crash tore the last line
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as JSON."""
        fields: dict[str, Any] = dict(getattr(record, "log_fields", {}))
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        content = {
            "time": when.replace("+00:00", "Z"),
            "level": fields.pop("level", record.levelname.lower()),
            "run": self.run,
            "event": fields.pop("event", "message"),
            "stage": fields.pop("stage", self.stage()) or None,
            **fields,
            # Halves of characters, as in file names that are no UTF-8, cannot be written.
            "message": record.getMessage().encode(errors="replace").decode(),
        }
        return escaped_json(to_json(content, inf_nan_mode="null", fallback=str).decode())

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Warn once that the log cannot be written."""
        if not self.is_broken:
            self.is_broken = True
            log.warning("%s cannot be written; the run goes on without it", self.file)

    def close(self) -> None:
        """Close the file; an error of a full disk was reported before."""
        with suppress(OSError):
            super().close()


@dataclass(frozen=True)
class EventEmitter:
    """Logs events of a run, those that docs/cli.md lists, and announces what is for the user."""

    announce: Callable[[str], None] = lambda line: None

    def __call__(
        self,
        event: str,
        stage: str | None,
        line: str,
        fields: Mapping[str, Any] = {},
        level: str = "info",
        is_announced: bool = True,
    ) -> None:
        """Log an event with its fields; `line` has it in words, which may be announced, too."""
        log_event(event, line, stage=stage, level=level, **fields)
        if is_announced:
            self.announce(line)
