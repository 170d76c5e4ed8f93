"""Forward passes that pause at a layer, so that many batches advance through a model in step.

A model's Python code runs in a thread of its own and asks the caller's thread for each of its torch
functions; while it gets no answer it waits, and its stack holds the activations that later layers
need. So any eager model can be paused, whatever its code does, and one pass visits all layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from contextvars import copy_context
from dataclasses import replace
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from compress.common.forward import flatten_outputs, shallow_copy
from compress.pruning.importance.layer_calls import LayerInput, layer_input_of, refused_samples

if TYPE_CHECKING:
    from torch import nn

    from compress.data.batch import Batch

    Requests = SimpleQueue["_Request | _Ended"]
    Answers = SimpleQueue[tuple[Any, BaseException | None]]


class _Closed(BaseException):
    """Raised in a model's code to end a forward pass early; no `except Exception` catches it."""


class _Request(NamedTuple):
    """A torch function that a model's code calls and waits for."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    has_gradients: bool
    autocast: tuple[str, torch.dtype] | None
    """Device type and dtype of the autocast that the model's code has entered."""


class _Ended(NamedTuple):
    """How a model's code ended: what it returned, or what it raised."""

    output: Any
    error: BaseException | None


class _Requests(TorchFunctionMode):
    """Asks for each torch function of a thread instead of running it, and waits for its result."""

    def __init__(self, requests: Requests, answers: Answers, device_type: str) -> None:
        super().__init__()
        self._requests, self._answers, self._device_type = requests, answers, device_type

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # Attributes like `shape` and `dtype` compute nothing: they are not worth two switches.
        # Whether gradients are recorded is, like autocast, a state of the thread that has set it.
        if getattr(func, "__name__", "") in ("__get__", "_set_grad_enabled"):
            return func(*args, **(kwargs or {}))
        kind = self._device_type
        autocast = (
            (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        )
        has_gradients = torch.is_grad_enabled()
        self._requests.put(_Request(func, args, kwargs or {}, has_gradients, autocast))
        result, error = self._answers.get()
        try:
            if error is not None:
                raise error
            return result
        finally:
            del error  # whose traceback holds this frame, and with it the model's activations


MAX_RESIDENT = 2**28
"""Bytes of activations that passes keep in memory between layers at most: little beside the sample
itself, and all of them in files take a ResNet-18 5 % longer."""


def resident_budget(device: str) -> int:
    """Return how many bytes of activations are kept in the memory of a device between layers."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0] // 2)
    with suppress(OSError, IndexError):  # Linux alone says what is available
        available = Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]
        return min(MAX_RESIDENT, int(available) * 1024 // 4)
    return MAX_RESIDENT


class ActivationFiles:
    """Activations of paused forward passes, of which those beyond a budget are kept in files.

    A file takes the place of a tensor's storage, which all of its views share, until the pass goes
    on, or a function of another pass reads it, as of a table that a library caches.
    """

    def __init__(self, folder: str, budget: int) -> None:
        """Keep at most ``budget`` bytes in memory, and files in a folder."""
        self._folder, self._room = Path(folder), budget
        self._files: dict[int, Path] = {}  # address of a storage → its file
        self._numbers = count()

    def store_(self, storages: Sequence[torch.UntypedStorage]) -> int:
        """Store those of a pass if they do not fit; return the bytes that stay in memory."""
        size = sum(storage.nbytes() for storage in storages)
        if size <= self._room:
            self._room -= size
            return size
        for storage in storages:
            # One that an array shares cannot be resized, and one on meta has no data.
            if storage.nbytes() and storage.data_ptr() and storage.resizable():
                file = self._files[storage._cdata] = self._folder / str(next(self._numbers))
                file.write_bytes(_bytes_of(storage.cpu()))  # type: ignore[no-untyped-call]
                storage.resize_(0)
        return 0

    def release(self, size: int) -> None:
        """Give back the room of a pass that goes on."""
        self._room += size

    def load_(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Load those that are in files."""
        for storage in storages if self._files else ():
            if storage.nbytes() or (file := self._files.pop(storage._cdata, None)) is None:
                continue
            host = torch.UntypedStorage(file.stat().st_size)  # type: ignore[no-untyped-call]
            with file.open("rb") as stream:
                stream.readinto(_bytes_of(host))
            file.unlink()
            storage.resize_(host.nbytes())
            storage.copy_(host)


def _bytes_of(storage: torch.UntypedStorage) -> Any:
    # Not numpy's view, which would forbid to resize the storage.
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """Return the storages of the tensors in a tree."""
    tensors = (x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor))
    return [x.untyped_storage() for x in tensors if x.layout is torch.strided]


class PausedForward:
    """One batch's forward pass through a module, which advances from layer to layer."""

    def __init__(self, module: nn.Module, batch: Batch, files: ActivationFiles) -> None:
        """Begin nothing yet; the module is in eval mode, and its weights are shared."""
        self.samples = len(batch)
        self._original, self._batch, self._files = module, batch, files
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._device_type = batch.inputs[0].device.type if batch.inputs else "cpu"
        self._thread: Thread | None = None
        self._pending: _Request | _Ended | None = None
        """What the module's code waits for; None while it runs."""
        self._made: dict[int, StorageWeakRef] = {}
        """Address → storage that a function of this pass made; not those of weights and inputs, nor
        of tensors that other code holds, such as a global mask."""
        self._resident = 0  # bytes of them that stay in memory while this pass is paused
        self._passed: set[str] = set()  # weights of the layers that have been called

    def has_passed(self, weight: str) -> bool:
        """Whether a layer was called, so that its input is not to be had any more."""
        return weight in self._passed or isinstance(self._pending, _Ended)

    def inputs_of(self, weight: str, calls: int) -> list[LayerInput]:
        """Run on to the last of a layer's calls, which waits, and return what they read.

        There are fewer if the model ends before.
        """
        own: list[LayerInput] = []
        self._resume()
        while isinstance(self._pending, _Request):
            call = layer_input_of(*self._pending[:3], self._names)
            if call is not None:
                self._passed.add(call.weight)
                if call.weight == weight:
                    if calls > 1:  # what follows the first calls may change these in place
                        added = None if call.added is None else call.added.clone()
                        call = replace(call, input=call.input.clone(), added=added)
                    own.append(call)
                    if len(own) == calls:
                        return own
                del call
            self._answer(*self._execute(self._pending))
        self.outputs()  # raises what the module has raised
        return own

    def outputs_of(self, weight: str, calls: int) -> list[torch.Tensor]:
        """Run past the last of a layer's calls, and return their outputs."""
        own: list[torch.Tensor] = []
        for _ in range(calls):
            if self.inputs_of(weight, 1) and isinstance(self._pending, _Request):
                result, error = self._execute(self._pending)
                if error is None:
                    own.append(result.clone() if calls > 1 else result)
                self._answer(result, error)
        return own

    def pause(self) -> None:
        """Store what the module's code still holds, and does not fit into memory, in files."""
        self._resident = self._files.store_(self._alive())

    def _alive(self) -> list[torch.UntypedStorage]:
        # A weak reference keeps the address from being used again.
        find: Any = torch.UntypedStorage._new_with_weak_ptr
        found = {at: find(one.cdata) for at, one in self._made.items()}
        self._made = {at: self._made[at] for at, storage in found.items() if storage is not None}
        return [storage for storage in found.values() if storage is not None]

    def _resume(self) -> None:
        """Begin at the first function, or go on."""
        if self._thread is None:
            self._requests: Requests = SimpleQueue()
            self._answers: Answers = SimpleQueue()
            thread = Thread(target=copy_context().run, args=(self._run_module,), daemon=True)
            thread.start()
            self._thread = thread  # once it runs, as close() waits for it
            self._pending = self._requests.get()
        # All of them, as compiled code that reads them asks for no torch function.
        self._files.load_(self._alive())
        self._files.release(self._resident)
        self._resident = 0

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Run to the end, and return what the module returns.

        Raises:
            StageFailed: the module does not take the batch.
        """
        self._resume()
        while isinstance(self._pending, _Request):
            self._answer(*self._execute(self._pending))
        ended: Any = self._pending
        with refused_samples(self._batch):
            if ended.error is not None:
                raise ended.error
            return flatten_outputs(ended.output)

    def close(self) -> None:
        """End the module's code, wherever it waits; it begins anew when it is asked for more."""
        if self._thread is None:
            return
        if self._pending is None:  # this thread was interrupted while the module's code ran
            self._pending = self._requests.get()
        while isinstance(self._pending, _Request):
            self._answer(None, _Closed())
        self._thread.join()
        self._resume()  # what outlives the pass may be read again
        self._thread, self._pending = None, None
        self._made, self._passed = {}, set()

    def _execute(self, request: _Request) -> tuple[Any, BaseException | None]:
        read = _storages((request.args, request.kwargs))
        self._files.load_(read)
        try:
            with torch.set_grad_enabled(request.has_gradients), ExitStack() as stack:
                if request.autocast is not None:
                    stack.enter_context(torch.autocast(*request.autocast))
                result = request.func(*request.args, **request.kwargs)
        except Exception as error:  # noqa: BLE001 - raised where the model's code may catch it
            return None, error
        known = {storage._cdata for storage in read}
        for storage in _storages(result):
            if storage._cdata not in known:
                weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._made.setdefault(storage._cdata, weak)
        return result, None

    def _answer(self, result: Any, error: BaseException | None) -> None:
        self._pending = None  # else its arguments would live as long as this request
        self._answers.put((result, error))
        del result
        self._pending = self._requests.get()

    def _run_module(self) -> None:
        output, raised = None, None
        try:
            # What forward keeps on the module, such as a cache, belongs to this pass alone.
            module = shallow_copy(self._original)
            with torch.no_grad(), _Requests(self._requests, self._answers, self._device_type):
                output = module(*self._batch.inputs)
        except _Closed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            raised = error
        self._requests.put(_Ended(output, raised))
