"""Calling a model: in eval mode, on some threads, with any batch size; naming its outputs."""

# torch is imported inside the functions, because reading a pipeline file imports this module.

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass
from functools import wraps
from itertools import chain
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeAlias

from compress.common.counts import count
from compress.common.dependency_recorder import Recording, add_to_recordings, recording
from compress.common.errors import ArtifactInvalid, PipelineInvalid, first_line
from compress.common.foreign.patching import patched_attribute
from compress.common.lazy_modules import torch
from compress.common.process import torch_threads
from compress.common.signature import OutputSpec, Signature, TensorSpec

if TYPE_CHECKING:
    Tensors: TypeAlias = tuple[torch.Tensor, ...]
    Outputs: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
    """A model's flattened outputs, or its only one."""

Arguments = ParamSpec("Arguments")

IMAGE_CHANNELS = (1, 3, 4)
OUTPUT = "output"  # name of an output that the model itself does not name


class Predictor(Protocol):
    """A loaded model that can be called, whatever its format."""

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Return the flattened outputs for inputs in the signature's order."""
        ...


class OpenedModel:
    """A model that was opened: a context manager of its predictor, or called until it is closed."""

    def __init__(self, manager: AbstractContextManager[Predictor], kind: str = "") -> None:
        self._manager, self._kind = manager, kind
        self._stack = ExitStack()
        self._predict: Predictor | None = None
        self._threads = 0

    def __enter__(self) -> Predictor:
        return count_forwards(self._stack.enter_context(self._manager), self._kind)

    def __exit__(self, *error: object) -> bool | None:
        return self._stack.__exit__(*error)  # type: ignore[arg-type]

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """Return the flattened outputs for inputs in the signature's order."""
        # Loading sets the process's number of threads, which is the caller's between two calls.
        own_threads = torch.get_num_threads()
        try:
            if self._predict is None:
                self._predict = self.__enter__()
                self._threads = torch.get_num_threads()
            torch.set_num_threads(self._threads)
            return self._predict(*inputs)
        finally:
            torch.set_num_threads(own_threads)

    def close(self) -> None:
        """Unload the model."""
        if self._predict is not None:
            own_threads = torch.get_num_threads()
            self._predict = None
            self._stack.close()
            torch.set_num_threads(own_threads)


class KeptModels(ExitStack):
    """Predictors that stay loaded until a block ends, by the arguments that opened them."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[tuple[Any, ...], tuple[Predictor, Recording]] = {}

    @contextmanager
    def predictor(
        self, opened: AbstractContextManager[Predictor], arguments: tuple[Any, ...]
    ) -> Iterator[Predictor]:
        """Give the predictor of these arguments, and record what was read to open it."""
        if arguments not in self._opened:
            with recording() as recorded:
                self._opened[arguments] = self.enter_context(opened), recorded
        predict, recorded = self._opened[arguments]
        add_to_recordings(recorded)
        yield predict


def opened_model(
    open_model: Callable[Concatenate[Any, Arguments], Iterator[Predictor]],
) -> Callable[Concatenate[Any, Arguments], OpenedModel]:
    """Decorate an artifact's generator method that yields a predictor, as ``contextmanager`` does.

    Within :meth:`~compress.artifacts.artifact.Artifact.keep_loaded` it is opened once.
    """
    manager = contextmanager(open_model)

    @wraps(open_model)
    def opened(artifact: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> OpenedModel:
        model, kept = manager(artifact, *args, **kwargs), artifact.kept_models
        kind = getattr(artifact, "kind", "")  # without one, it opens another artifact
        if kept is None:
            return OpenedModel(model, kind)
        arguments = (*args, *sorted(kwargs.items()))
        return OpenedModel(kept.predictor(model, arguments), kind)

    return opened


def count_forwards(predict: Predictor, kind: str) -> Predictor:
    """Count the calls of a predictor and their rows, below `forwards.KIND.calls` and `.rows`.

    A predictor without a kind, which calls one that is counted, stays as it is.
    """
    calls, rows = f"forwards.{kind}.calls", f"forwards.{kind}.rows"

    def predict_and_count(*inputs: torch.Tensor) -> Tensors:
        count(calls)
        count(rows, len(inputs[0]) if inputs[0].dim() else 1)
        return predict(*inputs)

    return predict_and_count if kind else predict


@contextmanager
def torch_predictor(module: Any, device: str, threads: int) -> Iterator[Predictor]:
    """Wrap a torch callable as a predictor that runs on a device with a number of CPU threads."""

    def predict(*inputs: torch.Tensor) -> Tensors:
        with torch.inference_mode():
            outputs = flatten_outputs(module(*(x.to(device) for x in inputs)))
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)  # kernels run on by themselves: latency would miss them
        return outputs

    with torch_threads(threads):
        yield predict


@contextmanager
def plain_attention() -> Iterator[None]:
    """Run torch's layers of transformers in a block as they are trained, traced and exported.

    Their fused path, which evaluation takes, answers zeros at padded places, and fails or answers
    NaN where a row is masked whole. Whether a mask is causal is not read from its values, which no
    trace can follow: attention gets the mask itself. Whatever reads a model's outputs calls it in
    such a block; whatever measures its time does not.
    """

    def is_causal(mask: Any, hint: bool | None = None, _: int | None = None) -> bool:
        return bool(hint)

    with (
        patched_attribute(torch.backends.mha, "_is_fastpath_enabled", False),
        patched_attribute(torch.nn.modules.transformer, "_detect_is_causal_mask", is_causal),
    ):
        yield


@contextmanager
def batched_experts() -> Iterator[None]:
    """Compute transformers' mixtures of experts in a block by batched products, for a trace.

    Its other forms sort rows by expert or loop over the experts that a batch meets, which no trace
    can follow. This one gathers the weights of each row's own experts, so that memory grows with
    the rows: whatever only calls a model leaves the form to transformers.
    """
    # Without it, no module of transformers with experts was built.
    library = sys.modules.get("transformers.integrations.moe")
    interface = getattr(library, "ExpertsInterface", object)  # not in a release before 5.0
    batched = getattr(library, "batched_mm_experts_forward", None)
    with patched_attribute(interface, "get_interface", lambda *_, **__: batched):
        yield


def accept_any_batch(predict: Predictor, signature: Signature) -> Predictor:
    """Let a predictor of a fixed batch size take any number of samples; others are unchanged."""
    # Inputs of different first sizes, such as the state of four layers, hold no samples in rows.
    sizes = {next(iter(spec.shape), None) for spec in signature.inputs}
    size = sizes.pop() if len(sizes) == 1 else None
    return split_batches(predict, size) if isinstance(size, int) else predict


def split_batches(predict: Predictor, size: int) -> Predictor:
    """Let a predictor get batches of one size, whatever number of samples it is called with."""

    def predict_in_batches(*inputs: torch.Tensor) -> Tensors:
        rows = len(inputs[0])
        batches = []
        for start in range(0, rows, size):
            # The last batch is filled up with copies of the last sample, whose outputs are dropped.
            wanted = torch.arange(start, start + size).clamp(max=rows - 1)
            batches.append(predict(*(x[wanted] for x in inputs)))
        return tuple(torch.cat(column)[:rows] for column in zip(*batches, strict=True))

    return predict_in_batches


def run_in_eval(module: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> Tensors:
    """Run a module in eval mode without gradients, then restore each submodule's own mode."""
    with preserve_modes(module), torch.inference_mode(), plain_attention():
        return flatten_outputs(module.eval()(*inputs))


def answer_one_row(
    module: torch.nn.Module, signature: Signature, inputs: Sequence[torch.Tensor]
) -> Tensors:
    """Return the outputs for the first row of inputs; for all where the batch has a fixed size.

    ArtifactInvalid where the module takes no batch of one row, which others are measured by.
    """
    axis, rows = signature.batch_axis, list[torch.Tensor]()
    for x, spec in zip(inputs, signature.inputs, strict=True):
        for place, name in enumerate(spec.shape):
            # The state of a recurrent layer has its rows along the second axis.
            if axis is not None and name == axis:
                x = x.narrow(place, 0, 1)
        rows.append(x)
    try:
        return run_in_eval(module, rows)
    except Exception as error:
        if axis is None:
            raise
        raise ArtifactInvalid(
            f"model.inputs: the model takes no batch of one row ({type(error).__name__}: "
            f"{first_line(error)}); if it normalizes by the batch in eval mode, as BatchNorm "
            "without running statistics does, give it these, or declare the batch size in "
            "model.inputs as a number"
        ) from error


def copy_module(
    module: torch.nn.Module, replacements: Mapping[int, torch.Tensor] | None = None
) -> torch.nn.Module:
    """Copy a module, also one that keeps tensors that autograd has computed.

    ``copy.deepcopy`` raises for these: weights that hooks of ``weight_norm``, ``spectral_norm`` and
    ``prune`` compute before each call, or results that forward keeps. They are detached.
    `replacements` has by the ``id`` of a tensor what the copy has in its place.
    """
    memo: dict[int, Any] = {}
    kept: list[Any] = []
    for value in chain.from_iterable(vars(part).values() for part in module.modules()):
        if type(value) in (dict, OrderedDict) and not value:
            # Each module has a dozen for hooks; `copy.deepcopy` rebuilds them in half of its time.
            memo[id(value)] = type(value)()
        elif not isinstance(value, bool | int | float | str | None):
            kept.append(value)
    computed = [x for x in torch.utils._pytree.tree_leaves(kept) if isinstance(x, torch.Tensor)]
    memo |= {id(x): x.detach().clone() for x in computed if not x.is_leaf}
    return copy.deepcopy(module, memo | dict(replacements or {}))


def shallow_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module but share its tensors, which slicing replaces in the copy alone."""
    return copy_module(module, {id(x): x for x in (*module.parameters(), *module.buffers())})


@contextmanager
def preserve_modes(module: torch.nn.Module) -> Iterator[None]:
    """Restore each submodule's own mode, training or eval, at the end of a block."""
    # Frozen TorchScript has no mode.
    modes = {part: part.training for part in module.modules() if hasattr(part, "training")}
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def flatten_outputs(output: Any) -> Tensors:
    """Return the tensors of nested sequences, mappings, dataclasses or ``.logits``.

    ArtifactInvalid where there is anything else, or no tensor.
    """
    return tuple(tensor for _, tensor in _named_tensors(output))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's numbers as bytes, without a copy where they lie in order on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def outputs_by_name(output: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's output by key; those without a key get a generated name."""
    flat: dict[str, torch.Tensor] = {}
    with suppress(ArtifactInvalid):
        flat = dict(_named_tensors(output))
    output = _as_mapping(output)
    if not isinstance(output, Mapping):
        output = {"logits": output.logits} if hasattr(output, "logits") else {}
    own = {str(key): v for key, v in output.items() if isinstance(v, torch.Tensor)}
    return own | {name: tensor for name, tensor in flat.items() if name not in own}


def output_argument(
    outputs: Outputs, names: Sequence[str]
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Return what a user's loss or metric is called with: one output itself, several by name.

    If there are not as many names as outputs, these are ``output_0``, ``output_1`` and so on.
    """
    if isinstance(outputs, torch.Tensor):
        return outputs
    if len(outputs) == 1:
        return outputs[0]
    if len(names) != len(outputs):
        names = [f"{OUTPUT}_{i}" for i in range(len(outputs))]
    return dict(zip(names, outputs, strict=True))


def image_advice(inputs: Sequence[torch.Tensor]) -> str:
    """Return how to make of images that a model refuses what convolutions take; else nothing."""
    for x in inputs:
        is_last = x.ndim == 4 and x.shape[3] in IMAGE_CHANNELS and x.shape[1] not in IMAGE_CHANNELS
        scaled = "" if x.is_floating_point() else ".float() / 255"
        if is_last:
            return (
                "; it looks like images with their channels last, and convolutions take floats "
                f"[n, channels, height, width]: return x.permute(2, 0, 1){scaled} of each"
            )
        if x.ndim == 4 and scaled and str(x.dtype) == "torch.uint8":
            return f"; it looks like images of bytes, and models take floats: return x{scaled}"
    return ""


def unbatched_advice(spec: TensorSpec) -> str:
    """Return how to give a batch axis to a model that takes one sample of an input without one."""
    shape = ",".join(map(str, (1, *spec.shape[1:])))
    return (
        "put a model of one sample without a batch axis into a module whose forward returns "
        f"model({spec.name}.squeeze(0))[None], and declare a batch of 1 ({spec.name}={shape})"
    )


def first_output(outputs: Outputs) -> torch.Tensor:
    """Return the first of a model's flattened outputs."""
    return outputs if isinstance(outputs, torch.Tensor) else outputs[0]


def match_outputs(output: Any, signature: Signature) -> tuple[tuple[str, ...], Signature]:
    """Return the entries to select from an output (empty: all), and the completed signature.

    Names that the model uses select among its outputs; other names rename all of them.

    Raises:
        PipelineInvalid: there are not as many tensors as names, or only some names are the model's.
        ArtifactInvalid: the output holds anything but tensors.
    """
    wanted = [spec.name for spec in signature.outputs]
    declared = "outputs" in signature.model_fields_set
    entries = outputs_by_name(output)
    known = [name for name in wanted if name in entries]
    if declared and known == wanted:
        with suppress(ArtifactInvalid):
            if wanted == [name for name, _ in _named_tensors(output)]:
                return (), signature
        return tuple(wanted), signature
    if declared and known:
        raise PipelineInvalid(f"model.outputs names {wanted}, and the model returns {[*entries]}")
    try:
        named = _named_tensors(output)
    except ArtifactInvalid as error:
        hint = f"; choose among {', '.join(entries)} with model.outputs" if entries else ""
        raise ArtifactInvalid(f"{error}{hint}") from None
    names: list[str] = []
    taken = {spec.name for spec in signature.inputs}
    for name, _ in named:  # made different from the inputs' names, and from each other
        while name in taken or name in names:
            name = f"{name}_{OUTPUT}"
        names.append(name)
    if not declared:
        outputs = tuple(OutputSpec(name=name) for name in names)
        return (), signature.model_copy(update={"outputs": outputs})
    if len(names) != len(wanted):
        returned = [*entries] or f"{len(names)} tensors"
        raise PipelineInvalid(f"model.outputs names {wanted}, and the model returns {returned}")
    return (), signature


def _as_mapping(output: Any) -> Any:
    """Return a named tuple or a dataclass as a dictionary of its fields; others as they are."""
    if hasattr(output, "_asdict"):
        return output._asdict()
    if is_dataclass(output) and not isinstance(output, Mapping):
        return {field.name: getattr(output, field.name) for field in fields(output)}
    return output


def _named_tensors(output: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of nested outputs in order, each with a name."""
    if isinstance(output, torch.Tensor):
        return [(name or OUTPUT, output)]
    if hasattr(output, "logits"):
        return [(f"{name}_logits" if name else "logits", output.logits)]
    output = _as_mapping(output)
    parts: list[tuple[str, Any]] = []
    if isinstance(output, dict):
        keys = [re.sub(r"\W", "_", str(key)) for key in output]
        parts = [
            (f"{name}_{k}" if name else k, v) for k, v in zip(keys, output.values(), strict=True)
        ]
    elif isinstance(output, list | tuple):
        parts = [(f"{name or OUTPUT}_{i}", value) for i, value in enumerate(output)]
    found = [pair for key, v in parts if v is not None for pair in _named_tensors(v, key)]
    if not found:
        raise ArtifactInvalid(f"the model returned {type(output).__name__}, expected tensors")
    return [(OUTPUT, found[0][1])] if [n for n, _ in found] == [f"{OUTPUT}_0"] else found


def positional_parameters(module: torch.nn.Module) -> list[str]:
    """Return the names of the parameters that forward takes by position."""
    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [p.name for p in forward_parameters(module) if p.kind is by_position]


def forward_parameters(module: torch.nn.Module) -> list[inspect.Parameter]:
    """Return forward's parameters; those of a TorchScript module from its schema."""
    if not isinstance(module, torch.jit.ScriptModule):
        return [*inspect.signature(module.forward).parameters.values()]
    forward: Any = module.forward
    _, *arguments = forward.schema.arguments
    return [inspect.Parameter(a.name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for a in arguments]
