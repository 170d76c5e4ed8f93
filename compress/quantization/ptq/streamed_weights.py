"""Weight-only quantization of a model whose weights stay on disk, block by block.

A block's weights are read, its inputs, which the blocks before it gave, run through it, its weights
are rounded, packed and written, and it is let go. What was written is not computed again after an
interruption. The integers are those of :func:`~.weight_only_graph.quantize_weights`: the pieces of
the graph have the same operators, and calibration runs in the float model in both.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from compress.artifacts.edits.removal import BLOCK_INDEX, blocks_of
from compress.artifacts.meta_init import stream_weights_
from compress.artifacts.streaming.packed_model import FACTOR, PARTS, TABLE, shared_parameters
from compress.checkpoint.safetensors_io import read_safetensors, write_safetensors
from compress.checkpoint.state_dict import StoredTensor, Weights, in_memory
from compress.common.atomic_files import sha256_of
from compress.common.config import Settings
from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs
from compress.common.malloc import release_memory, trim_memory
from compress.common.sealed_json import read_if_unchanged, read_state, write_sealed, write_state
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.data.batch import Batch
from compress.quantization.algorithms.input_scaling import bypass_copies_
from compress.quantization.config.dtype_scheme import WeightFormat
from compress.quantization.pt2e.graph_capture import (
    capture,
    module_of,
    remove_unread_tensors_,
    replace_value_,
)
from compress.quantization.pt2e.quantizer import LINEAR
from compress.quantization.ptq.weight_only_graph import WeightQuantizer, input_second_moments

if TYPE_CHECKING:
    from compress.artifacts.eager_model import EagerModel

logger = logging.getLogger(__name__)
KEY = "key.json"
RECORDED = ("quantized", "left_float", "rescaled", "scaled")
"""What a quantizer records, written with each piece."""
CARRIED = "carried"  # input of a piece: the output of the block before it
PLAIN = (bool, int, float, str, type(None))


class BlockArguments(NamedTuple):
    """How a block is called."""

    tree: Any
    """pytree of its positional and keyword arguments."""
    leaves: tuple[tuple[bool, Any], ...]
    """Whether a leaf is a tensor; its place among the outputs of the first piece, or its value."""

    @property
    def places(self) -> list[int]:
        """Outputs of the first piece that the block reads, that of the block before left out."""
        return sorted({x for is_tensor, x in self.leaves if is_tensor and x})


class BlockGraphs:
    """Captures a model in pieces: what comes before its blocks, each block, and what comes after.

    Run one after the other they compute what the whole graph does, by the same operators, but only
    one piece has weights. What blocks are given besides the output of the one before, such as masks
    and rotary embeddings, is computed by the first piece.
    """

    def __init__(self, model: EagerModel) -> None:
        """Find the model's blocks; raise StageFailed where it is no chain of blocks."""
        self.signature = model.signature
        self._module, self._weights = model.stored_weights()
        names = [*blocks_of(self._module)]
        outer = [n for n in names if not any(n.startswith(f"{other}.") for other in names)]
        if len(outer) != 1:
            raise StageFailed(
                "streams a model that is one chain of blocks, found "
                f"{', '.join(outer) or 'none'}; leave out `stream`"
            )
        self.container = outer[0]
        owners: dict[int, str] = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            in_block = name.startswith(f"{self.container}.")
            owner = ".".join(name.split(".")[: self.container.count(".") + 2]) if in_block else ""
            if owners.setdefault(id(parameter), owner) != owner:
                raise StageFailed(
                    f"{name} is shared with another block, expected blocks with weights of their "
                    "own; leave out `stream`"
                )
        blocks: Any = self._module.get_submodule(self.container)
        self._blocks: list[nn.Module] = list(blocks)
        self.tied = [
            name.rpartition(".")[0]
            for names, _ in shared_parameters(self._module)
            for name in names
            if len(names) > 1
        ]
        """Modules that share their weights, such as a table that is the last layer too."""
        self._returns_tuple = self._returned_by_first(*model.stored_weights())
        self.arguments: list[BlockArguments] = []
        """How each block is called; known once the first piece was captured."""
        self._specs: list[TensorSpec] = []
        self._traced: dict[int, fx.GraphModule] = {}
        """Blocks that were traced, and their graphs, whose weights take no memory."""

    def __len__(self) -> int:
        return len(self._blocks) + 2

    def name(self, index: int) -> str:
        """Return the name of a piece, for messages."""
        names = {0: f"before {self.container}", len(self) - 1: f"after {self.container}"}
        return names.get(index, f"{self.container}.{index - 1}")

    def capture(self, index: int) -> fx.GraphModule:
        """Return the graph of a piece with its weights, read from disk now.

        The first takes the model's inputs, and gives the first block's input and what else blocks
        read; a block takes :attr:`CARRIED` and what it reads of that; the last one takes the
        model's inputs and :attr:`CARRIED`.
        """
        if index and not self._specs:
            self._capture_first()  # how blocks are called
        if index == 0:
            graph = self._capture_first()
        elif index <= len(self._blocks):
            if (reused := self._reused_graph(index - 1)) is not None:
                return reused
            graph = self._capture_block(index - 1)
        else:
            graph = self._capture_last()
        bypass_copies_(graph)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        remove_unread_tensors_(graph)
        if 0 < index <= len(self._blocks):
            self._traced[index - 1] = _renamed(graph, "", "")
        self._read_weights_(graph)
        return graph

    def _read_weights_(self, graph: fx.GraphModule) -> None:
        read = {str(node.target): node for node in graph.graph.find_nodes(op="get_attr")}
        for name in read.keys() & self._weights.keys():
            replace_value_(graph, read[name], in_memory(self._weights[name]))

    def _reused_graph(self, index: int) -> fx.GraphModule | None:
        """Return the graph of an earlier block, with this block's names; None where they differ.

        Tracing takes seconds a block. Blocks of one class and equal settings have one graph; that
        of this block has to answer as the block does, bit for bit.
        """

        def described(number: int) -> tuple[BlockArguments, list[Any]]:
            return self.arguments[number], _described(self._blocks[number])

        block, wanted = self._blocks[index], described(index)
        known = next((each for each in self._traced if described(each) == wanted), None)
        if known is None:
            return None
        path = f"{self.container}.{index}"
        graph = _renamed(self._traced[known], f"{self.container}.{known}", path)
        self._read_weights_(graph)
        weights = dict(graph.named_parameters())
        inputs = self._block_signature(index).example()
        with (
            _other_parameters(block, lambda name, own: weights.get(f"{path}.{name}", own)),
            torch.inference_mode(),
        ):
            same = torch.equal(self._call_block(index, *inputs), flatten_outputs(graph(*inputs))[0])
        return graph if same else None

    def _capture_first(self) -> fx.GraphModule:
        arguments: list[BlockArguments] = []

        def forward(original: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Any, ...]:
            outputs: list[torch.Tensor] = []
            arguments.clear()

            def record(*args: Any, **kwargs: Any) -> Any:
                if not outputs:
                    outputs.append(args[0])
                arguments.append(_recorded(args, kwargs, outputs))
                return args[0]

            with self._blocks_replaced([record] * len(self._blocks)):
                original(*inputs)
            return tuple(outputs)

        graph = self._capture_whole(forward, self.signature)
        self.arguments = list(arguments)
        axes: dict[str, str] = {}
        placeholders = graph.graph.find_nodes(op="placeholder")
        for node, spec in zip(placeholders, self.signature.inputs, strict=True):
            for size, axis in zip(node.meta["val"].shape, spec.shape, strict=True):
                if isinstance(axis, str):
                    axes[str(size)] = axis
        results: Any = graph.graph.output_node().args[0]
        self._specs = [
            _spec(CARRIED if place == 0 else f"input_{place}", node, axes)
            for place, node in enumerate(results)
        ]
        return graph

    def _capture_block(self, index: int) -> fx.GraphModule:
        block = self._blocks[index]
        # Modules around it give the weights the names that they have in the model.
        root: nn.Module = block
        for name in reversed(f"{self.container}.{index}".split(".")):
            around = nn.Module()
            around.add_module(name, root)
            root = around
        with _without_memory(block):
            call = partial(self._call_block, index)
            return _captured(root.eval(), call, self._block_signature(index))

    def _call_block(self, index: int, *tensors: torch.Tensor) -> torch.Tensor:
        """Return a block's output, given :attr:`CARRIED` and what it reads of the first piece."""
        arguments = self.arguments[index]
        given = dict(zip([0, *arguments.places], tensors, strict=True))
        leaves = [given[x] if is_tensor else x for is_tensor, x in arguments.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, arguments.tree)
        return flatten_outputs(self._blocks[index](*args, **kwargs))[0]

    def _block_signature(self, index: int) -> Signature:
        specs = tuple(self._specs[place] for place in (0, *self.arguments[index].places))
        named = {d for spec in specs for d in spec.shape}
        axes = {k: bounds for k, bounds in self.signature.axes.items() if k in named}
        return Signature(inputs=specs, outputs=(OutputSpec(name="output"),), axes=axes)

    def _capture_last(self) -> fx.GraphModule:
        def forward(original: Callable[..., Any], *inputs: torch.Tensor) -> Any:
            *own, carried = inputs
            replaced = [lambda *_, **__: carried, *[lambda x, *_, **__: x] * len(self._blocks)]
            with self._blocks_replaced(replaced[: len(self._blocks)]):
                return flatten_outputs(original(*own))

        inputs = (*self.signature.inputs, self._specs[0])
        return self._capture_whole(forward, self.signature.model_copy(update={"inputs": inputs}))

    def _capture_whole(self, forward: Callable[..., Any], signature: Signature) -> fx.GraphModule:
        """Capture the model without its blocks, called through a function."""
        blocks: Any = self._module.get_submodule(self.container)
        entries = dict(blocks._modules)
        blocks._modules.clear()  # their weights would become inputs of the graph
        try:
            with _without_memory(self._module):
                return _captured(self._module, partial(forward, self._module.forward), signature)
        finally:
            blocks._modules.update(entries)

    @contextmanager
    def _blocks_replaced(self, calls: Sequence[Callable[..., Any]]) -> Iterator[None]:
        """Let the model call functions instead of its blocks, in a block of code."""
        blocks: Any = self._module.get_submodule(self.container)
        for i, (block, call) in enumerate(zip(self._blocks, calls, strict=True)):
            blocks._modules[str(i)] = _BlockStandIn(block, call, returns_tuple=self._returns_tuple)
        try:
            yield
        finally:
            blocks._modules.clear()

    def _returned_by_first(self, module: nn.Module, weights: Weights) -> int:
        """Return how many values the first block returns as a tuple; 0 where it is a tensor."""
        returned: list[Any] = []

        def stop(*args: Any) -> None:
            returned.append(args[-1])
            raise _FirstBlockReturnedError

        stream_weights_(module, weights)
        first: Any = module.get_submodule(f"{self.container}.0")
        first.register_forward_hook(stop)
        try:
            with torch.inference_mode():
                module(*self.signature.example())
        except _FirstBlockReturnedError:
            pass
        return len(returned[0]) if returned and isinstance(returned[0], tuple) else 0


class _FirstBlockReturnedError(Exception):
    """Ends a call of the model behind its first block."""


class _BlockStandIn(nn.Module):
    """Called instead of a block; it has the block's attributes, and none of its weights."""

    def __init__(self, block: nn.Module, call: Callable[..., Any], *, returns_tuple: int) -> None:
        super().__init__()
        # Not as a submodule, whose weights would become inputs of the graph.
        vars(self).update(_block=block, _call=call, _returns_tuple=returns_tuple)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._call(*args, **kwargs)
        return (output, *[None] * (self._returns_tuple - 1)) if self._returns_tuple else output

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_block"], name)


def _recorded(
    args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[torch.Tensor]
) -> BlockArguments:
    """Return how a block is called; tensors that are new are added to the outputs."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    recorded: list[tuple[bool, Any]] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            place = next((i for i, known in enumerate(outputs) if known is leaf), len(outputs))
            if place == len(outputs):
                outputs.append(leaf)
            recorded.append((True, place))
        elif isinstance(leaf, PLAIN):
            recorded.append((False, leaf))
        else:
            raise StageFailed(
                f"a block is given a {type(leaf).__name__}, expected tensors and plain values; "
                "leave out `stream`"
            )
    return BlockArguments(tree, tuple(recorded))


def _captured(module: nn.Module, call: Callable[..., Any], signature: Signature) -> fx.GraphModule:
    """Capture a module that is called through another function."""
    any_way = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [inspect.Parameter(spec.name, any_way) for spec in signature.inputs]

    def forward(*inputs: torch.Tensor) -> Any:
        return call(*inputs)

    # torch.export reads the parameters' names and number here.
    forward.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
    module.forward = forward
    try:
        return capture(module, signature)
    finally:
        del module.forward


def _described(block: nn.Module) -> list[Any]:
    """Return what decides a block's graph: classes, shapes, and settings but its own number."""
    found: list[Any] = []
    for name, part in block.named_modules():
        tensors = {**part._parameters, **part._buffers}
        shapes = [(k, None if t is None else (t.shape, t.dtype)) for k, t in tensors.items()]
        settings = {
            key: value
            for key, value in vars(part).items()
            if key not in BLOCK_INDEX and isinstance(value, (*PLAIN, tuple))
        }
        found.append((name, type(part), shapes, settings))
    return found


def _renamed(graph: fx.GraphModule, before: str, after: str) -> fx.GraphModule:
    """Return a copy of a graph that shares its tensors, with another beginning of their names."""

    def renamed(name: str) -> str:
        return after + name[len(before) :] if f"{name}.".startswith(f"{before}.") else name

    copy = fx.Graph()
    copy.output(copy.graph_copy(graph.graph, {}))
    for node in copy.nodes:
        if node.op == "get_attr":
            node.target = renamed(str(node.target))
        if stack := node.meta.get("nn_module_stack"):
            node.meta["nn_module_stack"] = {
                key: (renamed(path), kind) for key, (path, kind) in stack.items()
            }
    tensors = [*graph.named_parameters(), *graph.named_buffers()]
    return fx.GraphModule({renamed(name): tensor for name, tensor in tensors}, copy)


@contextmanager
def _other_parameters(
    module: nn.Module, other: Callable[[str, nn.Parameter], nn.Parameter]
) -> Iterator[None]:
    """Give a module other parameters, by name and own one, in a block of code."""
    parts = [(name, part, dict(part._parameters)) for name, part in module.named_modules()]
    try:
        for name, part, own in parts:
            for key, parameter in own.items():
                if parameter is not None:
                    part._parameters[key] = other(f"{name}.{key}".lstrip("."), parameter)
        yield
    finally:
        for _, part, own in parts:
            part._parameters.update(own)


def _without_memory(module: nn.Module) -> AbstractContextManager[None]:
    """Give a module weights in memory that is never written, and so takes none, in a block."""
    # Not on the meta device: the graph's other tensors are on the CPU, as the weights will be.
    made: dict[int, nn.Parameter] = {}

    def empty(_: str, p: nn.Parameter) -> nn.Parameter:
        return made.setdefault(id(p), nn.Parameter(torch.empty(p.shape), False))

    return _other_parameters(module, empty)


def _spec(name: str, node: Any, axes: dict[str, str]) -> TensorSpec:
    """Return a spec with the signature's axes for a graph's output."""
    value = node.meta["val"]
    shape = [size if isinstance(size, int) else axes.get(str(size)) for size in value.shape]
    if None in shape:
        raise StageFailed(
            f"blocks read a tensor of {tuple(value.shape)}, whose sizes are not axes of the "
            "model's inputs; leave out `stream`"
        )
    dtype: Any = str(value.dtype).removeprefix("torch.")
    return TensorSpec(name=name, shape=tuple(shape), dtype=dtype)


class Piece(Settings):
    """What was written of one quantized piece."""

    recorded: dict[str, Any]
    files: dict[str, str]
    """File of its weights, and of what it gives to the next piece → its SHA-256."""


@dataclass
class StreamedQuantization:
    """Quantizes a model piece by piece, into files of a work folder."""

    model: EagerModel
    quantizer: WeightQuantizer
    batches: Iterable[Batch]
    """The calibration sample, of which one batch is in memory; empty where the method needs none.
    """
    work: Path

    def run(self, progress: Callable[[str, int, int], None]) -> dict[str, StoredTensor]:
        """Quantize the pieces that are not written yet, and return all tensors, on disk."""
        self._claim_work()
        self.quantizer.after_weight = trim_memory
        blocks = BlockGraphs(self.model)
        done = self._resume(len(blocks))
        if done:
            logger.info("goes on at %s, piece %d of %d", blocks.name(done), done + 1, len(blocks))
        for index in range(done, len(blocks)):
            began = time.monotonic()
            self._quantize_piece(blocks, index)
            release_memory()  # graphs hold themselves in cycles, and glibc keeps what is freed
            logger.info("%s: %.1f s", blocks.name(index), time.monotonic() - began)
            progress("quantize", index + 1, len(blocks))
        self.quantizer.require_quantized()
        module, weights = self.model.stored_weights()
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        # Tensors that no piece reads stay as they are.
        state: dict[str, StoredTensor] = {k: x for k, x in weights.items() if k not in parameters}  # type: ignore[misc]
        for index in range(len(blocks)):
            state |= read_safetensors(self._file(index))
        return state

    def _quantize_piece(self, blocks: BlockGraphs, index: int) -> None:
        graph = blocks.capture(index)
        release_memory()  # of tracing, which allocates much and keeps little
        weights = {str(n.target) for n in graph.graph.find_nodes(op="get_attr")}
        moments: dict[str, torch.Tensor] = {}
        if self._calibrates:
            following = self._carried(index + 1)
            unfinished = following.with_suffix(".partial")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            numbers = count()

            def keep(outputs: Any) -> None:
                if index == len(blocks) - 1:  # nothing reads what the last one gives
                    return
                tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
                state = {str(place): tensor for place, tensor in enumerate(tensors)}
                write_safetensors(unfinished / f"{next(numbers)}.safetensors", state)

            moments = input_second_moments(graph, self._inputs(blocks, index), keep)
            shutil.rmtree(following, ignore_errors=True)
            unfinished.replace(following)
        trim_memory()
        self.quantizer.quantize_(graph, moments, blocks.tied)
        remove_unread_tensors_(graph)
        recorded = {k: getattr(self.quantizer, k) for k in RECORDED}
        recorded["rescaled"] = sorted(recorded["rescaled"])
        write_safetensors(self._file(index), _state_of(graph, weights))
        written = [self._file(index), *self._carried(index + 1).glob("*")]
        files = {file.relative_to(self.work).as_posix(): sha256_of(file) for file in written}
        write_sealed(self._record(index), Piece(recorded=recorded, files=files))
        if self._calibrates and index > 1:  # what the first piece gave is read by all blocks
            shutil.rmtree(self._carried(index), ignore_errors=True)

    def _inputs(self, blocks: BlockGraphs, index: int) -> Iterator[Batch]:
        """Yield the inputs of a piece for each batch of the calibration sample."""
        for number, batch in enumerate(self.batches):
            if index == 0:
                yield batch
                continue
            name = f"{number}.safetensors"
            carried = in_memory(read_safetensors(self._carried(index) / name)["0"])
            if index == len(blocks) - 1:
                yield Batch((*batch.inputs, carried), None)
                continue
            more = read_safetensors(self._carried(1) / name)
            places = blocks.arguments[index - 1].places
            yield Batch((carried, *(in_memory(more[str(place)]) for place in places)), None)

    @property
    def _calibrates(self) -> bool:
        return self.quantizer.format.calibrates

    def _record(self, index: int) -> Path:
        """Return the file of what was recorded of a piece, the last one that is written of it."""
        return self._file(index).with_suffix(".json")

    def _file(self, index: int) -> Path:
        return self.work / f"piece-{index:04d}.safetensors"

    def _carried(self, index: int) -> Path:
        """Return the folder of a piece's inputs, which the one before gave: a file a batch."""
        return self.work / f"carried-{index:04d}"

    def _resume(self, pieces: int) -> int:
        """Return how many pieces are written, and restore what the quantizer recorded of them."""
        done, recorded = 0, dict[str, Any]()
        while done < pieces and (piece := self._written(done)):
            done, recorded = done + 1, piece.recorded
        if done and self._calibrates and done < pieces and not self._carried(done).is_dir():
            return 0
        for name, value in recorded.items():
            setattr(self.quantizer, name, type(getattr(self.quantizer, name))(value))
        return done

    def _written(self, index: int) -> Piece | None:
        """Return what was recorded of a piece; None where one of its files is not as written."""
        piece = read_if_unchanged(self._record(index), Piece)
        for name, digest in piece.files.items() if piece else ():
            file = self.work / name
            # What it gives to the next piece is removed once that has read it.
            is_needed = file.exists() or file == self._file(index)
            if is_needed and not (file.exists() and sha256_of(file) == digest):
                logger.warning("%s is not as it was written; it is quantized again", file)
                return None
        return piece

    def _claim_work(self) -> None:
        """Empty the work folder where it is of another model, other settings or other data."""
        numbers, exclude = self.quantizer.format, self.quantizer.exclude
        settings = numbers.model_dump(include={*WeightFormat.model_fields}) | {"exclude": exclude}
        parts = {"model": self.model.digest, "settings": settings, "torch": torch.__version__}
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
        for batch in self.batches:
            for tensor in batch.inputs:
                digest.update(tensor.contiguous().numpy().tobytes())
        file, key = self.work / KEY, digest.hexdigest()
        if read_state(file, key, bool) is None:
            shutil.rmtree(self.work, ignore_errors=True)
            write_state(file, key, True)


def _state_of(graph: fx.GraphModule, weights: set[str]) -> dict[str, torch.Tensor]:
    """Return a quantized graph's tensors by the names of the parameters that it had read."""
    own = {k: x.detach() for k, x in [*graph.named_parameters(), *graph.named_buffers()]}
    state = {name: own[name] for name in weights if name in own}
    for name in weights:
        stem = name.replace(".", "_")
        for suffix, kind in (("", ""), ("_rows", TABLE)):
            for part in PARTS:
                if (tensor := own.get(f"{stem}{suffix}{part.replace('.', '_')}")) is not None:
                    state[f"{name}{kind}{part}"] = tensor
    for node in graph.graph.find_nodes(op="get_attr"):
        pending = list(node.users) if str(node.target).endswith("_smoothing") else []
        while pending:  # the linear layers that its result reaches first
            reader = pending.pop()
            if reader.target is LINEAR:
                state[f"{module_of(reader)}{FACTOR}"] = own[str(node.target)]
            else:
                pending += reader.users
    return {name: tensor.contiguous() for name, tensor in state.items()}
