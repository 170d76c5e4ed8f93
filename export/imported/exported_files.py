"""Imports models that were exported elsewhere: ONNX, `torch.export` and TorchScript files."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from compress.artifacts.artifact import MANIFEST, Artifact, FileVersion
from compress.artifacts.carried_files import ONNX_FILE
from compress.checkpoint.file_kinds import unreadable
from compress.common.atomic_files import file_below, refuse_irregular, sha256_while_unchanged
from compress.common.errors import ArtifactInvalid, PipelineInvalid, raised_as
from compress.common.foreign.child_process import read_in_child
from compress.common.lazy_modules import np, torch
from compress.common.sealed_json import canonical_json
from compress.common.signature import (
    EXAMPLE_LENGTH,
    OutputSpec,
    Signature,
    TensorSpec,
    refuse_double_names,
)
from compress.export.imported.taken_sizes import LARGEST_CALLED, with_taken_sizes

logger = logging.getLogger(__name__)
Kind = Literal["onnx", "graph", "torchscript"]
KINDS: dict[str, Kind] = {
    ".onnx": "onnx",
    ".pt2": "graph",
    **dict.fromkeys((".ts", ".torchscript", ".jit", ".pt", ".pth"), "torchscript"),
}
"""Kind of artifact that a file becomes, by the ending of its name."""


@contextmanager
def opened_artifact(path: Path, sha256: str | None = None) -> Iterator[Artifact]:
    """Yield the artifact of a directory, or of its deployed file, or of an exported file alone.

    The last has no manifest: it is imported into a temporary folder, with the signature that it
    tells. ArtifactInvalid for other files, for TorchScript, which tells none, and where neither
    the deployed file nor the artifact's digest has the expected SHA-256.
    """
    signature = signature_of_file(path)
    if signature is None:
        artifact = Artifact.from_directory(path.parent if path.is_file() else path)
        if path.is_file() and path.name != artifact.payload_name:
            raise ArtifactInvalid(f"{path}: expected the directory, or its {artifact.payload_name}")
        refuse_wrong_artifact_hash(artifact, sha256)
        yield artifact
        return
    if sha256 is not None and (found := sha256_while_unchanged(path)) != sha256.lower():
        raise ArtifactInvalid(f"{path}: sha256 is {found}, expected {sha256}")
    # The commands show errors only.
    logger.error(
        "note: %s is a file alone: its inputs and outputs are those that it tells, nothing was "
        "validated, and no answer is checked against a validation",
        path,
    )
    with TemporaryDirectory(prefix="compress-file-") as temporary:
        # The folder has the file's name, by which `bench` shows the model.
        imported = Path(temporary) / "artifacts" / path.name
        yield import_file(KINDS[path.suffix], path, signature, imported)


def signature_of_file(path: Path) -> Signature | None:
    """Read the signature of an exported file alone; None for an artifact, or a file of one.

    ArtifactInvalid as :func:`opened_artifact`.
    """
    if path.is_dir() or (path.parent / MANIFEST).is_file():
        return None
    if path.suffix not in KINDS:
        raise ArtifactInvalid(
            f"{path}: expected an artifact's directory, or a file that ends in {', '.join(KINDS)}"
        )
    signature = signature_of(KINDS[path.suffix], path)
    if signature is None:
        raise ArtifactInvalid(
            f"{path}: a TorchScript file does not tell what its inputs are: `compress init {path}` "
            "writes a pipeline file, whose run makes an artifact of it"
        )
    return signature


def refuse_wrong_artifact_hash(artifact: Artifact, sha256: str | None) -> None:
    """Raise ArtifactInvalid if neither the digest nor the deployed file has the expected SHA-256.

    The file's hash is read from the manifest: verify the files separately.
    """
    found = artifact.manifest.files[artifact.payload_name].sha256
    if sha256 is not None and sha256.lower() not in (found, artifact.digest):
        raise ArtifactInvalid(
            f"{artifact.payload_path}: sha256 is {found}, expected {sha256}, which is not the "
            f"artifact's digest {artifact.digest} either"
        )


def signature_of(kind: Kind, file: Path) -> Signature | None:
    """Read inputs and outputs of a file; None for TorchScript, which has no shapes."""
    _refuse_missing(file)
    if kind == "torchscript":
        return None
    if kind == "onnx":
        declared = read_in_child(str(file), lambda: _onnx_signature(file), file)
        parts = _with_weights(file)
        is_large = sum(part.stat().st_size for part in parts) > LARGEST_CALLED
        if is_large or not {*declared.dynamic_axes} - {declared.batch_axis}:
            return declared
        return read_in_child(str(file), partial(with_taken_sizes, file, declared), *parts)
    from compress.export.imported.pt2_files import signature_of_program

    return read_in_child(str(file), lambda: signature_of_program(file), file)


def class_names_of(kind: Kind, file: Path) -> tuple[str, ...]:
    """Read the names of classes that an ONNX file holds; empty for other files."""
    if kind != "onnx":
        return ()
    from compress.export.onnx.graph import class_names_in

    def read() -> tuple[str, ...]:
        entries = _read_onnx(file).metadata_props
        return tuple(class_names_in({entry.key: entry.value for entry in entries}))

    return read_in_child(str(file), read, file)


def _refuse_missing(file: Path) -> None:
    refuse_irregular(file)
    if not file.is_file():
        raise ArtifactInvalid(f"{file}: no such file")


def digest_of(file: Path) -> str | None:
    """Return a SHA-256 of a file, and of those in which an ONNX file keeps its weights."""
    if not file.is_file():
        return None
    digests = [sha256_while_unchanged(part) for part in _with_weights(file)]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _with_weights(file: Path) -> list[Path]:
    def outside() -> list[str]:
        # Not by `proto_io`, which imports torch.
        from onnx.external_data_helper import ExternalDataInfo, _get_all_tensors, uses_external_data

        apart = filter(uses_external_data, _get_all_tensors(_read_onnx(file)))
        return sorted({ExternalDataInfo(tensor).location for tensor in apart})

    names = read_in_child(str(file), outside, file) if file.suffix == ".onnx" else []
    weights = [file_below(file, name) for name in names]
    for part in weights:
        if not part.is_file():
            raise ArtifactInvalid(f"{file}: expected weights in {part}, found no such file")
    return [file, *weights]


def import_file(
    kind: Kind,
    file: Path,
    signature: Signature,
    path: Path,
    inputs: Sequence[torch.Tensor] | None = None,
    carried: Mapping[str, bytes] | None = None,
    *,
    to_module: bool = False,
) -> Artifact:
    """Import an exported model in a child with limits, after a call with `inputs`, or seeded.

    ``carried`` are files beside the model; ``to_module`` asks for a PyTorch module of an ONNX file.
    """
    _refuse_missing(file)
    importer: Callable[..., Artifact] = _import_onnx if kind == "onnx" else _import_script
    if to_module:
        importer = _import_module
    if kind == "graph":
        from compress.export.imported.pt2_files import import_program as importer
    sizes = {a: signature.bounds(a).nearest(EXAMPLE_LENGTH) for a in signature.dynamic_axes}
    made_up = [spec.nbytes(sizes) for spec in signature.inputs]
    needed = sum([x.nbytes for x in inputs] if inputs else made_up)

    def write() -> dict[FileVersion, str]:
        return importer(file, signature, path, inputs, carried).file_versions()

    written = read_in_child(str(file), write, *_with_weights(file), inputs=needed)
    artifact = Artifact.from_directory(path)
    artifact.note_hashed(written)
    return artifact


def _import_onnx(
    file: Path,
    signature: Signature,
    path: Path,
    inputs: Sequence[torch.Tensor] | None,
    carried: Mapping[str, bytes] | None,
) -> Artifact:
    import onnx
    import onnx_ir as ir

    from compress.data.infer_signature import described
    from compress.export.onnx.graph import class_names_in, remove_unread_
    from compress.export.onnx.proto_io import LARGEST, WEIGHTS, load_weights_
    from compress.export.onnx.session import counted_predictor
    from compress.export.onnx.stage import OnnxModel
    from compress.graph.from_onnx.reading import find_weights_

    own = _onnx_signature(file)
    found, given = ([spec.name for spec in s.inputs] for s in (signature, own))
    if found != given:
        raise PipelineInvalid(f"model.inputs: {file} has {given}, found {found}")
    given = [output.name for output in own.outputs]
    wanted = [o.name for o in signature.outputs if "outputs" in signature.model_fields_set]
    renames = len(wanted) == len(given) and not {*wanted} & {*given}
    if not (renames or {*wanted} <= {*given}):
        raise PipelineInvalid(f"model.outputs names {wanted}, and {file} gives {given}")
    wanted = wanted or given
    outputs = tuple(OutputSpec(name=name) for name in wanted)
    signature = signature.model_copy(update={"outputs": outputs})
    model = _read_onnx(file)
    is_large = sum(part.stat().st_size for part in _with_weights(file)) > LARGEST
    if not is_large:
        load_weights_(model, file)
    opset = max((o.version for o in model.opset_import if not o.domain), default=0)
    if renames:
        for value, name in zip(model.graph.output, wanted, strict=True):
            model.graph.node.append(onnx.helper.make_node("Identity", [value.name], [name]))
            value.name = name
    elif wanted != given:
        values = {value.name: value for value in model.graph.output}
        del model.graph.output[:]
        model.graph.output.extend(values[name] for name in wanted)
        if not model.graph.sparse_initializer:  # which onnx-ir (1.1) loses
            needed = ir.from_proto(model)
            remove_unread_(needed)
            model = ir.to_proto(needed)
    operators = Counter(node.op_type for node in model.graph.node)
    facts: dict[str, Any] = {"opset": opset, "operators": dict(sorted(operators.items()))}
    if names := class_names_in({entry.key: entry.value for entry in model.metadata_props}):
        facts["class_names"] = names
    with OnnxModel.atomic_write(path, signature, facts=facts, carried=carried) as partial:
        payload = partial / OnnxModel.payload
        if is_large:
            large = ir.from_proto(model)
            find_weights_(large, file)
            with raised_as(ArtifactInvalid, str(file)):
                ir.save(large, payload, external_data=WEIGHTS, size_threshold_bytes=0)
        else:  # the same model has the same bytes, and by them the same digest
            payload.write_bytes(model.SerializeToString(deterministic=True))
        inputs = tuple(inputs or signature.example())
        what = f"model.inputs: {file} does not take {described(signature.inputs)}"
        with raised_as(ArtifactInvalid, what):
            predict, kernels = counted_predictor(payload, 1, inputs)
            predict(*inputs)
        facts |= kernels
    return OnnxModel.from_directory(path)


def _import_module(
    file: Path,
    signature: Signature,
    path: Path,
    inputs: Sequence[torch.Tensor] | None,
    carried: Mapping[str, bytes] | None,
) -> Artifact:
    """Import an ONNX file as a module, compared with ONNX Runtime on two numbers of rows."""
    from compress.artifacts.importing import import_module
    from compress.artifacts.recipe import Recipe
    from compress.graph.from_onnx.proof import prove
    from compress.graph.from_onnx.reading import module_of, pack, read_graph

    graph = read_graph(file)
    module = module_of(graph)
    found, given = [spec.name for spec in signature.inputs], module.input_names
    if len(found) != len(given):
        raise PipelineInvalid(f"model.inputs: {file} has {given}, found {found}")
    if "outputs" not in signature.model_fields_set:
        outputs = tuple(OutputSpec(name=name) for name in module.output_names)
        signature = signature.model_copy(update={"outputs": outputs})
    first = tuple(inputs or signature.example())
    examples = [first]
    if all(isinstance(spec.shape[0], str) for spec in signature.inputs if spec.shape):
        examples.append(tuple(torch.cat([x, x[:1]]) if x.ndim else x for x in first))
    prove(module, file, examples)
    values = {value.name: value for value in graph.graph.inputs}
    dims = {
        axis: dim.value
        for spec, name in zip(signature.inputs, module.input_names, strict=True)
        for axis, dim in zip(spec.shape, values[name].shape or (), strict=False)
        if isinstance(axis, str) and not isinstance(dim, int) and _is_named(dim.value)
    }
    said = {
        "metadata": {**graph.metadata_props},
        "doc_string": graph.doc_string,
        "name": graph.graph.name,
        "axes": dims,
        "weights": {key: source.initializer for key, source in module.sources.items()},
        "sha256": digest_of(file),
    }
    carried = {**(carried or {}), ONNX_FILE: canonical_json(said).encode()}
    recipe = Recipe(
        factory="compress.graph.from_onnx.module:build", arguments={"graph": pack(graph)}
    )
    return import_module(path, recipe, module, signature, inputs=inputs, carried=carried)


def _import_script(
    file: Path,
    signature: Signature,
    path: Path,
    inputs: Sequence[torch.Tensor] | None,
    carried: Mapping[str, bytes] | None,
) -> Artifact:
    from compress.artifacts.recipe_inference import fit_call
    from compress.export.torchscript.file_io import adapt_calls, load, save
    from compress.export.torchscript.stage import TorchScriptModel

    module = load(file).eval()
    forward: Any = module.forward
    for argument in forward.schema.arguments[1:]:
        kind = str(argument.type)
        if kind in ("int", "float", "bool", "str", "Device") and not argument.has_default_value():
            raise ArtifactInvalid(
                f"{file}: forward takes {argument.name}, of type {kind}, and inputs are tensors; "
                f"save a module whose forward calls this one with a fixed {argument.name}"
            )
    inputs = inputs or signature.example()
    edits, signature = fit_call(module, signature, inputs, str(file))
    module = adapt_calls(module, edits, inputs).eval()
    # A frozen module has no parameters; its artifact counts the constants of its graph then.
    facts: dict[str, Any] = {"parameters": sum(p.numel() for p in module.parameters())}
    if signature.state:  # it is where calls put what they start from
        facts["one_call_at_a_time"] = True
    with TorchScriptModel.atomic_write(path, signature, facts=facts, carried=carried) as partial:
        save(module, partial / TorchScriptModel.payload)
    return TorchScriptModel.from_directory(path)


def _is_named(dim: str | None) -> bool:
    """Whether what an ONNX file says of an axis is a name: Paddle writes "?" for unknown ones."""
    return re.search(r"\w", dim or "") is not None


def _axis_name(key: str | tuple[str, int], known: dict[object, str]) -> str:
    """Return the name of an axis that a file names, or of an input's; `known` are those so far."""
    if key not in known:
        word = re.sub(r"\W", "_", key if isinstance(key, str) else f"{key[0]}_{key[1]}")
        word = word if word.isidentifier() else f"axis_{word}"
        while word in known.values():
            word += "_"
        known[key] = word
    return known[key]


def _onnx_signature(file: Path) -> Signature:
    import onnx

    graph, inputs, axes = _read_onnx(file).graph, [], dict[object, str]()
    constants = {tensor.name for tensor in graph.initializer}
    for value in graph.input:
        if value.name in constants:  # files of IR versions below 4 list weights as inputs, too
            continue
        tensor = value.type.tensor_type
        try:
            dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)).name
            shape: list[int | str] = []
            for axis, dim in enumerate(tensor.shape.dim):
                named = dim.dim_param if _is_named(dim.dim_param) else ""
                key = named or ("batch" if axis == 0 else (value.name, axis))
                shape.append(dim.dim_value if dim.dim_value > 0 else _axis_name(key, axes))
            content = {"name": value.name, "shape": shape, "dtype": dtype}
            inputs.append(TensorSpec.model_validate(content))
        except (KeyError, ValueError) as error:
            raise ArtifactInvalid(
                f"{file}: input {value.name!r} is not a tensor of numbers with a known rank"
            ) from error
    if not inputs:
        raise ArtifactInvalid(f"{file}: takes no inputs")
    outputs = tuple(OutputSpec(name=output.name) for output in graph.output)
    try:
        refuse_double_names(tuple(inputs), outputs)
    except ValueError as error:
        raise ArtifactInvalid(
            f"{file}: {error}; give each tensor a name of its own, an input that is also an output "
            "by an Identity operator"
        ) from error
    return Signature(inputs=tuple(inputs), outputs=outputs)


def _read_onnx(file: Path) -> Any:
    import onnx

    try:
        return onnx.load(file, load_external_data=False)
    except Exception as error:
        raise unreadable(file, "an ONNX file", error) from error
