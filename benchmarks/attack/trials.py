"""Tries a command on a hostile file: what it ran, opened, asked for, printed, and how it ended.

Each command is a fork of a process that has imported the toolkit (`tests.forking`), with a limit of
time and memory, and with canaries: a file that planted code would write (`ran`), a folder that
nothing may open (`outside`), and a hook that reports connections.
"""

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from compress.common.printable import CONTROL_CHARACTERS
from tests.forking import COMMAND_SERVER, Command, Commands

SECRET = "a-secret-that-lies-outside"
MOST_SECONDS, MOST_GIB = 30.0, 2.0
BUSY = 10
"""How much longer than that a command may take beside other work, until it is ended."""
REFUSALS = {2, 3, 4}
"""Exit codes of bad input, a gate, and what is not installed."""
MOST_LINES = 50
"""A command may refuse several mistakes of one file, each in its line."""
IN_OPEN = 0x20
# The toolkit's own hook goes first: what that refuses has asked nobody.
FIRST = """
import atexit, resource, sys
from compress.artifacts.hf_folder import _watch_connections
_watch_connections()
def _watch(event, arguments):
    if event in ("socket.getaddrinfo", "socket.connect", "os.system"):
        target = arguments[0] if event != "socket.connect" else arguments[1]
        is_local = isinstance(target, (str, bytes)) and event == "socket.connect"
        if not is_local and "127.0.0.1" not in str(target) and "localhost" not in str(target):
            with open({asked!r}, "a") as log:
                log.write(f"{{event}} {{target}}\\n")
sys.addaudithook(_watch)
@atexit.register
def _peak():
    with open({peak!r}, "w") as log:
        log.write(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
"""


class AttackedCommands(Commands):
    """A process that has also imported what reads models of Hugging Face."""

    SERVER = COMMAND_SERVER.replace(
        "gc.freeze()",
        "import transformers.models.auto.modeling_auto, transformers.models.bert.modeling_bert\n"
        "gc.freeze()",
    )


@dataclass(frozen=True)
class Trial:
    """How one command fared with one case."""

    case: str
    command: str
    code: int | None
    """None where it was ended for its time or memory."""
    errors: str
    seconds: float
    """Without those in which the process that waited longest for a processor had none."""
    gib: float
    """Largest resident memory of its processes, together."""
    ran: bool
    """Whether planted code ran."""
    opened: bool
    """Whether a file outside of what was given was opened, or shown."""
    asked: str
    """Connections and name lookups."""

    def failure(self) -> str:
        """Return what the command should not have done, or nothing."""
        lines = [line for line in self.errors.splitlines() if line.strip()]
        checks = [
            (self.ran, "planted code ran"),
            (self.opened, "a file outside was opened"),
            (bool(self.asked), f"asked the network: {self.asked.strip()}"),
            (self.seconds > MOST_SECONDS, f"took {self.seconds:.0f} s"),
            (self.gib > MOST_GIB, f"took {self.gib:.1f} GiB"),
            (self.code is None, "was ended"),
            ("internal error" in self.errors, "internal error"),
            ("Traceback (most recent" in self.errors, "traceback"),
            (CONTROL_CHARACTERS.search(self.errors) is not None, "printed control characters"),
            (self.code not in {0, *REFUSALS}, f"exit code {self.code}"),
            (self.code in REFUSALS and not lines, "refused without a word"),
            (self.code in REFUSALS and len(lines) > MOST_LINES, f"{len(lines)} lines"),
        ]
        return "; ".join(text for is_wrong, text in checks if is_wrong)


class OpenWatch:
    """Counts who opens files of a folder, by inotify, which sees native readers too."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK)
        for path in (folder, *folder.rglob("*")):
            self._libc.inotify_add_watch(self._fd, os.fsencode(path), IN_OPEN)

    def opened(self) -> bool:
        """Return whether anything was opened, and end the watch."""
        try:
            found = select.select([self._fd], [], [], 0)[0]
            return bool(found)
        finally:
            os.close(self._fd)


class CommandTrials:
    """Tries commands on cases, in forks of one process."""

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._starting = threading.Lock()

    def try_command(
        self, case: str, folder: Path, arguments: Sequence[str | Path], before: str = ""
    ) -> Trial:
        """Run `compress` in a case's folder, after some code; the canaries lie in the folder."""
        outside, ran = folder / "outside", folder / "ran"
        asked, peak = folder / "asked.txt", folder / "peak.txt"
        outside.mkdir(exist_ok=True)
        (outside / "secret.txt").write_text(SECRET)
        watch = OpenWatch(outside)
        first = FIRST.format(asked=str(asked), peak=str(peak)) + before
        temporary = folder / "tmp"
        temporary.mkdir(exist_ok=True)
        environment = {"TMPDIR": str(temporary), "HOME": str(temporary), "COLUMNS": "200"}
        environment["OMP_NUM_THREADS"] = "1"
        began = time.monotonic()
        with self._starting:
            command = self._commands.start(
                *arguments, cwd=folder, first=first, environment=environment
            )
        gib, was_ended = 0.0, threading.Event()
        done, waits = threading.Event(), dict[int, float]()

        def guard() -> None:
            nonlocal gib
            while not done.wait(0.05):
                family = processes_below(command.pid)
                gib = max(gib, gib_of(family))
                for member in family:  # one that has ended just now has waited for 0 s
                    waits[member] = max(waits.get(member, 0.0), seconds_waited(member))
                took = time.monotonic() - began - max(waits.values(), default=0.0)
                if gib > MOST_GIB + 1 or took > MOST_SECONDS + 5:
                    was_ended.set()
                    end_session(command)

        guarding = threading.Thread(target=guard)
        guarding.start()
        try:
            output, errors = command.communicate(BUSY * MOST_SECONDS)
        except subprocess.TimeoutExpired:
            output = errors = ""
            was_ended.set()
        seconds = time.monotonic() - began - max(waits.values(), default=0.0)
        done.set()
        guarding.join()
        end_session(command)
        for log in (asked, peak):
            log.touch()
        gib = max(gib, int(peak.read_text() or 0) / 2**20)
        return Trial(
            case=case,
            command=str(arguments[0]),
            code=None if was_ended.is_set() else command.returncode,
            errors=errors,
            seconds=seconds,
            gib=gib,
            ran=ran.exists(),
            opened=watch.opened() or SECRET in output + errors,
            asked=asked.read_text(),
        )


def processes_below(pid: int) -> list[int]:
    """Return a process and those below it."""
    family = [pid]
    for member in family:
        with contextlib.suppress(OSError, ValueError):
            for task in Path(f"/proc/{member}/task").iterdir():
                family += map(int, (task / "children").read_text().split())
    return family


def gib_of(family: Sequence[int]) -> float:
    """Return the largest memory so far of processes, that is theirs alone."""
    total = 0
    for member in family:
        with contextlib.suppress(OSError, ValueError):
            lines = Path(f"/proc/{member}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return total / 2**20


def seconds_waited(pid: int) -> float:
    """Return how long a process's main thread was ready to run, and had no processor."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return 0.0


def end_session(command: Command) -> None:
    """Kill what is left of a command, which leads a session of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(command.pid, signal.SIGKILL)


@contextlib.contextmanager
def case_folder(root: Path, name: str) -> Iterator[Path]:
    """Return a folder for one case, which is removed afterwards."""
    folder = root / name.replace("/", "_").replace(" ", "-")[:100]
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
