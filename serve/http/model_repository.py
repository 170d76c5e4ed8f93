"""The loaded models by name and version: which one answers a request, and their replacement.

A version is loaded, verified and called beside those that answer. Then the table of addresses is
replaced in one step of the event loop, so that each request is answered whole by one version. The
version before is closed once its last request has ended.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import re
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.common.errors import PipelineInvalid, cause_lines

if TYPE_CHECKING:
    from compress.serve.http.shared_state import Served
    from compress.serve.worker.tensors import Named

    Loader = Callable[[Path, str, str], Callable[[], Served]]
    Key = tuple[str, str]

logger = logging.getLogger(__name__)

NAME, VERSION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*"), re.compile(r"[1-9][0-9]{0,8}")
KEPT = 2  # versions of a watched model that are loaded: the newest, and the one to return to
WATCH_SECONDS = 1.0
DRAIN_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Route:
    """Who answers the requests to one address: a version, or for a share of them the canary."""

    served: Served
    canary: Served | None = None
    share: float = 0.0

    def choose(self) -> Served:
        """Return the version for the next request."""
        if self.canary is not None and random.random() < self.share:
            return self.canary
        return self.served


@dataclass
class ModelVersion:
    """What is known of one version in the repository."""

    files: Any
    """Names, inodes, sizes and times of the files when they were loaded last."""
    served: Served | None = None
    reason: str = ""
    """Why the files are not loaded, or `unloaded`; empty if they are."""


@dataclass
class ModelRepository:
    """Models by name and version; each is replaced without losing a request.

    All methods are called in the event loop.
    """

    load: Loader
    """Loads a folder in a thread, by name and version; returns what starts to answer requests."""
    folders: Mapping[str, Mapping[str, Path]] = field(default_factory=dict)
    """Folders of artifacts, by name and version."""
    watched: Path | None = None
    """A folder of others, as NAME/VERSION; versions are numbers."""
    canaries: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Name → version, and its share of the requests that name none."""
    routes: dict[str, Route] = field(default_factory=dict, init=False)
    """Address → who answers. It is replaced, never changed."""
    pages: dict[str, tuple[Named, Served]] = field(default_factory=dict, init=False)
    """Path → what describes a model, and who answers for it."""
    _known: dict[Key, ModelVersion] = field(default_factory=dict, init=False)
    _pinned: dict[str, set[str]] = field(default_factory=dict, init=False)
    """Name → the only versions to load, none if it is unloaded."""
    _retired: set[Served] = field(default_factory=set, init=False)
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set, init=False)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def loaded(self, name: str | None = None) -> list[Served]:
        """Return all loaded versions, or those of one model; later ones behind earlier ones."""
        some = [each for each in self._served().values() if name in (None, each.name)]
        return sorted(some, key=lambda each: int(each.version))

    def _served(self) -> dict[Key, Served]:
        return {key: e.served for key, e in self._known.items() if e.served is not None}

    def index(self) -> list[dict[str, str]]:
        """Return name, version, state and reason of all versions, as Triton's repository API."""
        return [
            {"name": name, "version": version, "state": state, "reason": each.reason}
            for (name, version), each in sorted(self._known.items())
            for state in ["READY" if each.served is not None else "UNAVAILABLE"]
        ]

    def add(self, served: Served, files: Any = None) -> None:
        """Let a version answer from now on, and drain the one that it replaces."""
        for address in served.addresses(of_version=False):
            route = self.routes.get(address)
            if route is not None and route.served.name != served.name:
                self._retire(served)
                raise PipelineInvalid(f"{address} is answered by {route.served.name} already")
        before = self._known.get((served.name, served.version))
        self._known[served.name, served.version] = ModelVersion(files, served)
        self._publish()
        if before is not None and before.served is not None:
            self._retire(before.served)

    async def load_model(self, name: str, versions: Collection[str] = ()) -> None:
        """Load what has changed of a model, only these versions if given, until it answers.

        PipelineInvalid where there is none of that name and these versions; else what loading
        raises, while what answered before goes on. A caller that is cancelled does not end it.
        """
        present = await asyncio.to_thread(self._scan)
        found = [each for key, each in present if key == name]
        if not found or not set(versions).issubset(found):
            what = f"{name[:200]}: version {', '.join(versions) or 'any'}"
            raise PipelineInvalid(f"{what} is not in the repository; found {found or [*present]}")
        self._pinned.pop(name, None)
        if versions:
            self._pinned[name] = set(versions)
        failures = await asyncio.shield(self.spawn(self.refresh([name], again=True)))
        for error in failures.values():
            raise error

    async def unload_model(self, name: str) -> None:
        """Let a model answer no further requests until it is loaded again."""
        if not self.loaded(name):
            raise PipelineInvalid(f"{name[:200]}: no such model is loaded")
        self._pinned[name] = set()
        await asyncio.shield(self.spawn(self.refresh([name])))

    async def refresh(
        self,
        names: Collection[str] | None = None,
        *,
        again: bool = False,
        settled: Mapping[Key, Any] | None = None,
    ) -> dict[Key, Exception]:
        """Load what is new or changed, of some models or all; then unload what is gone.

        What failed to load is loaded `again` only if asked for; what was not as `settled` says
        is left for later. Returns what each version failed with.
        """
        failures: dict[Key, Exception] = {}
        async with self._lock:
            wanted = self._wanted(present := await asyncio.to_thread(self._scan))
            for (name, version), folder in wanted.items():
                if names is not None and name not in names:
                    continue
                files = await asyncio.to_thread(file_states, folder)
                known = self._known.get((name, version))
                if known is not None and known.files == files and not (again and known.reason):
                    continue
                if settled is not None and settled.get((name, version)) != files:
                    continue
                try:
                    start = await asyncio.to_thread(self.load, folder, name, version)
                    self.add(start(), files)
                except Exception as error:  # noqa: BLE001 - what answers now goes on
                    failures[name, version] = error
                    known = self._known.setdefault((name, version), ModelVersion(files))
                    known.files, known.reason = files, "; ".join(cause_lines(error))
            self._unload(present, wanted, names)
        return failures

    async def watch(self) -> None:
        """Load what appears or changes in the watched folder, until cancelled."""
        before: dict[Key, Any] = {}
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            # What changed since the last look may be copied just now.
            before = await self.reload(settled=before)

    async def reload(self, settled: Mapping[Key, Any] | None = None) -> dict[Key, Any]:
        """Refresh all models, log what fails, and return the states of all files before."""
        try:
            states = await asyncio.to_thread(
                lambda: {key: file_states(folder) for key, folder in self._scan().items()}
            )
            failures = await self.refresh(again=settled is None, settled=settled)
        except OSError as error:
            logger.error("%s cannot be read: %s", self.watched, error)
            return {}
        self.log_failures(failures)
        return states

    @staticmethod
    def log_failures(failures: Mapping[Key, Exception]) -> None:
        """Log what was not loaded, and why."""
        for (name, version), error in failures.items():
            logger.error("%s version %s: %s", name, version, "; ".join(cause_lines(error)))

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something beside the requests, until the repository is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop alone would let it be collected
        task.add_done_callback(self._tasks.discard)
        return task

    def close(self) -> None:
        """Close all versions, also those that are not drained."""
        for task in self._tasks:
            task.cancel()
        for served in {*self.loaded(), *self._retired}:
            served.close()

    def _scan(self) -> dict[Key, Path]:
        """Return the folder of each version that is there."""
        found = {(n, v): path for n, some in self.folders.items() for v, path in some.items()}
        models = sorted(self.watched.iterdir()) if self.watched is not None else []
        for model in models:
            if NAME.fullmatch(model.name) and model.is_dir() and model.name not in self.folders:
                for version in model.iterdir():
                    if VERSION.fullmatch(version.name) and version.is_dir():
                        found[model.name, version.name] = version
        return found

    def _wanted(self, present: Mapping[Key, Path]) -> dict[Key, Path]:
        """Return what is to be loaded of what is there."""
        wanted: dict[Key, Path] = {}
        for name in sorted({name for name, _ in present}):
            versions = sorted((v for n, v in present if n == name), key=int)
            pinned = self._pinned.get(name)
            if pinned is not None and (not pinned or pinned.intersection(versions)):
                versions = [each for each in versions if each in pinned]
            elif name not in self.folders:
                canary, _ = self.canaries.get(name, ("", 0.0))
                stable = [each for each in versions if each != canary]
                versions = stable[-KEPT:] + [each for each in versions if each == canary]
            wanted |= {(name, version): present[name, version] for version in versions}
        return wanted

    def _unload(
        self, present: Mapping[Key, Path], wanted: Mapping[Key, Path], names: Collection[str] | None
    ) -> None:
        # A watched folder that is not mounted looks empty, too.
        is_empty = self.watched is not None and all(name in self.folders for name, _ in present)
        for key, known in [*self._known.items()]:
            kept = is_empty and key[0] not in {*self.folders, *self._pinned}
            if kept or key in wanted or (names is not None and key[0] not in names):
                continue
            ready = [other in self._served() for other in wanted if other[0] == key[0]]
            # A version that is still there is kept until all others answer; others, until one does.
            if ready and not (all(ready) if key in present else any(ready)):
                continue
            self._known[key] = ModelVersion(None, None, "unloaded")
            if key not in present:
                del self._known[key]
            if known.served is not None:
                self._publish()
                self._retire(known.served)

    def _publish(self) -> None:
        """Replace the tables of addresses."""
        routes: dict[str, Route] = {}
        pages: dict[str, tuple[Named, Served]] = {}
        by_name: dict[str, list[Served]] = {}
        for served in self.loaded():
            by_name.setdefault(served.name, []).append(served)
        for name, some in by_name.items():
            canary, share = self.canaries.get(name, ("", 0.0))
            is_divided = name not in self._pinned and len(some) > 1
            on_trial = next((e for e in some if is_divided and e.version == canary), None)
            newest = [each for each in some if each is not on_trial][-1]
            versions = [each.version for each in some]
            answering = [(newest, Route(newest, on_trial, share), False)]
            answering += [(each, Route(each), True) for each in some]
            for each, route, of_version in answering:
                routes |= dict.fromkeys(each.addresses(of_version=of_version), route)
                described = each.pages(versions, of_version=of_version)
                pages |= {path: (content, each) for path, content in described.items()}
        self.routes, self.pages = routes, pages

    def _retire(self, served: Served) -> None:
        self._retired.add(served)
        self.spawn(self._drain(served))

    async def _drain(self, served: Served) -> None:
        """Close a version once its last request has ended."""
        while served.in_progress:
            await asyncio.sleep(DRAIN_POLL_SECONDS)
        await asyncio.to_thread(served.close)
        self._retired.discard(served)
        del served
        # What was there when the server started, or was loaded since, is visited by no collection.
        gc.unfreeze()
        gc.collect()
        gc.freeze()


def file_states(folder: Path) -> Any:
    """Return what changes with the files of a folder: their names, inodes, sizes and times."""
    states = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        try:
            found = path.stat()
        except OSError:  # it is replaced just now, or loading says what is wrong with it
            continue
        states[str(path.relative_to(folder))] = found.st_ino, found.st_size, found.st_mtime_ns
    return states
