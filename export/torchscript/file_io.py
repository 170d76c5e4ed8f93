"""TorchScript modules: made from eager ones, written reproducibly, read, their weights counted."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatchcase
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from compress.artifacts.edits.independent_calls import script_attributes, unchanged
from compress.artifacts.recipe import AnyEdit, CallByName, IndependentCalls
from compress.checkpoint.file_kinds import TORCHSCRIPT, unreadable
from compress.checkpoint.safe_zip import refuse_bomb
from compress.common.errors import ArtifactInvalid, StageFailed, raised_as
from compress.common.foreign.patching import patched_attribute
from compress.common.forward import OUTPUT, batched_experts, plain_attention
from compress.graph.torch_export import with_flat_outputs

if TYPE_CHECKING:
    from compress.common.signature import Signature


class Wrapper(nn.Module):
    """A module around another one."""

    # TorchScript files hold the class's name: this one keeps their digests what they were.
    _jit_override_qualname = "__torch__.export.torchscript_outputs.Chosen"

    def __init__(self, part: nn.Module, start: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.part = part
        for name, tensor in start.items():
            self.register_buffer(name, tensor)


def adapt_calls(
    module: torch.jit.ScriptModule, edits: Sequence[AnyEdit], inputs: Sequence[torch.Tensor]
) -> torch.jit.ScriptModule:
    """Return a module around another one that is called as edits of a recipe say.

    `inputs` are an example: the outputs for it show where each is. Raise ArtifactInvalid for state
    of a type that TorchScript code cannot write.
    """
    if not edits:
        return module
    # Written in TorchScript: a trace would record one path through the module alone.
    types, start, lines = script_attributes(module), dict[str, torch.Tensor](), list[str]()
    given, returned = [f"x{i}" for i in range(len(inputs))], "answer"
    arguments = ", ".join(["self", *given])
    for edit in edits:
        if isinstance(edit, IndependentCalls):
            for name in edit.state:
                value = _source(attrgetter(name)(module), name, start)
                lines.append(f"self.part.{name} = torch.jit.annotate({types[name]}, {value})")
            given = [f"{x}.clone()" if edit.copies_inputs else x for x in given]
        elif isinstance(edit, CallByName):
            if edit.inputs:
                given = [f"{key}={x}" for key, x in zip(edit.inputs, given, strict=True)]
            if edit.outputs:
                with unchanged(module), torch.inference_mode():
                    places = dict(_places(module(*[x.clone() for x in inputs])))
                returned = f"({''.join(f'answer{places[name]}, ' for name in edit.outputs)})"
    lines += [f"answer = self.part({', '.join(given)})", f"return {returned}"]
    with quiet():
        outer: Any = torch.jit.script(Wrapper(module, start))
    outer.define("\n    ".join([f"def forward({arguments}):", *lines]) + "\n")
    return outer  # type: ignore[no-any-return]


def _source(value: Any, name: str, start: dict[str, torch.Tensor]) -> str:
    """Return TorchScript code that makes a value anew; its tensors are added to `start`."""
    if isinstance(value, torch.Tensor):
        start[f"start_{len(start)}"] = value.detach().clone()
        return f"self.{[*start][-1]}.clone()"
    if isinstance(value, float):
        return f"float({str(value)!r})"
    if value is None or isinstance(value, bool | int | complex | str):
        return repr(value)
    if isinstance(value, list | tuple):
        parts = "".join(f"{_source(x, name, start)}, " for x in value)
        return f"[{parts}]" if isinstance(value, list) else f"({parts})"
    if isinstance(value, dict):
        pairs = [(_source(k, name, start), _source(x, name, start)) for k, x in value.items()]
        return f"{{{', '.join(f'{k}: {x}' for k, x in pairs)}}}"
    raise ArtifactInvalid(
        f"the TorchScript module keeps state in {name}, of type {type(value).__name__}, which no "
        "call can start anew; make the state an input and an output of forward"
    )


def _places(output: Any, name: str = "") -> list[tuple[str, str]]:
    """Return for each tensor its name, and the source code that takes it from the output."""
    if isinstance(output, torch.Tensor):
        return [(name, "")]
    before = f"{name}_" if name else ""
    if hasattr(output, "_asdict"):
        parts = [(f"{before}{key}", f".{key}", value) for key, value in output._asdict().items()]
    elif isinstance(output, Mapping):
        parts = [(f"{before}{key}", f"[{key!r}]", value) for key, value in output.items()]
        parts += [(re.sub(r"\W", "_", key), *place) for key, *place in parts]
    else:
        parts = [(f"{name or OUTPUT}_{i}", f"[{i}]", value) for i, value in enumerate(output)]
    return [(n, f"{place}{rest}") for k, place, v in parts for n, rest in _places(v, k)]


ROOT = "the model's own forward"


def script_parts_(
    module: torch.nn.Module, patterns: Sequence[str], trace: Callable[[], Any]
) -> None:
    """Replace submodules that match, or else in which `trace` guesses, by scripted ones.

    Raise StageFailed where a name fits none, one cannot be scripted, or all would have to be.
    """
    if patterns:
        names = [name for name, _ in module.named_modules() if name]
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise StageFailed(f"scripted: no submodule is named {pattern!r}")
        names = [n for n in names if any(fnmatchcase(n, p) for p in patterns)]
    else:
        with record_guesses(module) as names:
            trace()
        if ROOT in names:
            raise StageFailed(
                f"{ROOT} branches or counts by the data, and no part of it; use `method: script`, "
                "or put that into a submodule"
            )
    # A scripted module takes those inside it along.
    for name in sorted(set(names)):
        if any(name.startswith(f"{outer}.") for outer in names):
            continue
        with raised_as(StageFailed, f"torch.jit.script cannot express {name}"):
            scripted = torch.jit.script(module.get_submodule(name))
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, scripted)


@contextmanager
def record_guesses(module: torch.nn.Module) -> Iterator[list[str]]:
    """Collect the names of modules that convert a tensor to a number while they are traced.

    The trace fixes the number, or the branch taken, whatever the data of later calls is.
    """
    # torch's warning does not name the module, so hooks record which one runs.
    names = {part: name or ROOT for name, part in module.named_modules()}
    running: list[str] = []
    guessing: list[str] = []

    def enter(part: torch.nn.Module, _: Any) -> None:
        running.append(names.get(part, running[-1] if running else ROOT))

    def leave(_: torch.nn.Module, __: Any, ___: Any) -> None:
        running.pop()

    def record(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if not issubclass(category, torch.jit._trace.TracerWarning):
            showwarning(message, category, *place, **more)
        elif (running or [ROOT])[-1] not in guessing:
            guessing.append((running or [ROOT])[-1])

    showwarning = warnings.showwarning
    unhookable = {  # scripted parts, and torch's integer layers
        inner
        for part in module.modules()
        if isinstance(part, torch.jit.ScriptModule)
        or type(part).__module__.startswith("torch.ao.nn.")
        for inner in part.modules()
    }
    with warnings.catch_warnings(), ExitStack() as hooks:
        for part in module.modules():
            if part not in unhookable:
                hooks.enter_context(part.register_forward_pre_hook(enter))
                hooks.enter_context(part.register_forward_hook(leave))
        warnings.simplefilter("always", torch.jit._trace.TracerWarning)
        warnings.showwarning = record
        yield guessing


MANGLED = re.compile(rb"___torch_mangle_\d+")
"""TorchScript's suffix of a class whose name was used before: a counter of the process."""
TEXT = (".py", ".pkl")
SOURCE_LOCATIONS = ".debug_pkl"
VERSIONS = ("version", ".data/version")
WRITTEN_BY_TORCH = (*VERSIONS, "byteorder", ".data/serialization_id")
"""Records that PyTorchFileWriter adds to every archive itself."""

Function = torch.autograd.Function
CONTEXT_METHODS = (
    *("save_for_backward", "save_for_forward", "mark_dirty"),
    *("mark_non_differentiable", "set_materialize_grads"),
)
"""What a forward pass may call of its `ctx`."""
OTHERS = {"trace": "script", "script": "trace", "mixed": "script"}


def to_torchscript(
    module: torch.nn.Module,
    signature: Signature,
    inputs: Sequence[torch.Tensor] | None = None,
    *,
    method: Literal["trace", "script", "mixed"] = "trace",
    scripted: Sequence[str] = (),
    freeze: bool = True,
) -> tuple[torch.jit.ScriptModule, list[str]]:
    """Return a module in eval mode as TorchScript, and the submodules in which tracing guessed.

    A trace, of seeded inputs when none are given, guesses where Python code reads a number from a
    tensor: see :func:`record_guesses`. The module's own submodules may be replaced. Raise
    StageFailed where TorchScript cannot express the module.
    """
    inputs = signature.example() if inputs is None else tuple(inputs)
    guessed: list[str] = []

    def trace() -> Any:
        flat = with_flat_outputs(module, inputs)
        # The tracer's own check runs the same inputs again; the parity check does more.
        with inlined_functions():
            return torch.jit.trace(flat, inputs, check_trace=False)  # type: ignore[no-untyped-call]  # torch

    verb = "script" if method == "script" else "trace"
    problem = f"torch.jit.{verb} cannot express the model"
    advice = f"; try `method: {OTHERS[method]}`"
    with (
        raised_as(StageFailed, problem, advice),
        torch.no_grad(),
        plain_attention(),
        batched_experts(),
        quiet(),
    ):
        made: Any
        if method == "mixed":
            script_parts_(module, scripted, trace)
        if method == "script":
            made = torch.jit.script(module)
        else:
            with record_guesses(module) as guessed:
                made = trace()
        return torch.jit.freeze(made) if freeze else made, guessed


def inlined_functions() -> AbstractContextManager[None]:
    """Have `Function.apply` call `forward` directly, in a block."""

    # The tracer would record a call of Python code, which no TorchScript file can hold.
    def apply(cls: type[Function], *inputs: Any, **named: Any) -> Any:
        if cls.setup_context is not Function.setup_context:
            return cls.forward(*inputs, **named)
        # Without a backward pass there is nothing to store.
        stores = dict.fromkeys(CONTEXT_METHODS, lambda *_, **__: None)
        context = SimpleNamespace(needs_input_grad=(False,) * len(inputs), **stores)
        return cls.forward(context, *inputs, **named)

    return patched_attribute(Function, "apply", classmethod(apply))


def save(module: torch.jit.ScriptModule, file: Path) -> None:
    """Write a module, equal ones in equal bytes; StageFailed where it calls Python code."""
    buffer = io.BytesIO()
    with quiet(), raised_as(StageFailed, "torch.jit.save"):
        torch.jit.save(module, buffer)
    buffer.seek(0)
    reader = torch._C.PyTorchFileReader(buffer)
    numbers: dict[bytes, bytes] = {}

    def renumber(match: re.Match[bytes]) -> bytes:
        # In order of appearance, not by how many classes the process has made before.
        return numbers.setdefault(match[0], b"___torch_mangle_%d" % len(numbers))

    with file.open("wb") as stream:
        writer = torch._C.PyTorchFileWriter(stream)
        # With an older version, operators would be read with the meaning that they had then.
        version = next(name for name in reader.get_all_records() if name in VERSIONS)
        writer.set_min_version(int(reader.get_record(version)))
        for name in reader.get_all_records():
            if name.endswith(SOURCE_LOCATIONS) or name in WRITTEN_BY_TORCH:
                continue  # source locations name the author's folders
            record = reader.get_record(name)
            if name.endswith(TEXT):
                name = MANGLED.sub(renumber, name.encode()).decode()
                record = MANGLED.sub(renumber, record)
            writer.write_record(name, record, len(record))
        writer.write_end_of_file()


def load(file: Path, device: str = "cpu", *, optimized: bool = False) -> Any:
    """Read a module; ArtifactInvalid where it is no TorchScript, truncated, or too much."""
    refuse_bomb(file)
    try:
        with quiet():
            module = torch.jit.load(file, map_location=device)  # type: ignore[no-untyped-call]  # torch
            # Convolutions in the memory layout of this processor, which torch (2.13) cannot save.
            return torch.jit.optimize_for_inference(module) if optimized else module
    except (RuntimeError, ValueError) as error:
        raise unreadable(file, TORCHSCRIPT, error) from error


def count_weights(module: Any) -> int:
    """Count the elements of a module's parameters and constants, scalars left out."""
    graph = module.inlined_graph  # the nodes live as long as this name does
    constants = [n for n in graph.findAllNodes("prim::Constant") if n.hasAttribute("value")]
    tensors = [n.t("value") for n in constants if n.kindOf("value") == "t"]
    tensors = [*(t for t in tensors if t.dim()), *module.parameters()]  # none where it is frozen
    return sum(t.numel() for t in tensors)


@contextmanager
def quiet() -> Iterator[None]:
    """Hide torch's deprecations, which the stage logs in one line instead."""
    with warnings.catch_warnings():
        # Annotations in graph modules, which scripting does not need.
        warnings.filterwarnings("ignore", message=r"The TorchScript type system doesn't support")
        # Tensors of quint8 and qint8 are to leave torch after TorchScript.
        warnings.filterwarnings("ignore", message=r"torch\.quantize_per_tensor, .* are deprecated")
        warnings.filterwarnings("ignore", message=r"`torch\.jit\.\w+` is deprecated")
        yield
