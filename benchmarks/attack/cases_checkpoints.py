"""Hostile checkpoints: pickles that would call functions, archives and headers that lie.

`CASES` maps a name to a function that writes one file or folder into a folder and returns its path.
Planted code would write `ran` there.
"""

import importlib
import io
import json
import os
import pickle
import random
import stat
import struct
import subprocess
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

Case = Callable[[Path], Path]


class Call:
    """An object whose pickle calls a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class State:
    """An object whose pickle calls ``__setstate__`` of another class."""

    def __init__(self, function: Any, state: Any) -> None:
        self.call = function, (), state

    def __reduce__(self) -> Any:
        return self.call


def global_call(module: str, name: str, *arguments: str) -> bytes:
    """Return a pickle that calls a function by name, which need not exist here."""
    texts = b"".join(b"V" + text.encode() + b"\n" for text in arguments)
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"(" + texts + b"tR."


def stack_global_call(module: str, name: str, argument: str) -> bytes:
    """Return a pickle of protocol 4 that puts a function's name together on the stack."""

    def text(value: str) -> bytes:
        return b"\x8c" + bytes([len(value)]) + value.encode()

    return b"\x80\x04" + text(module) + text(name) + b"\x93" + text(argument) + b"\x85R."


def program(ran: Path) -> str:
    """Return Python source that leaves the trace."""
    return f"open({str(ran)!r}, 'w')"


PLANTED: dict[str, Callable[[Path], bytes]] = {
    "os.mkdir": lambda ran: pickle.dumps(Call(os.mkdir, str(ran)), 2),
    "os.system": lambda ran: pickle.dumps(Call(os.system, f"touch {ran}"), 2),
    "subprocess.call": lambda ran: pickle.dumps(Call(subprocess.call, ["touch", str(ran)]), 2),
    "subprocess.Popen": lambda ran: pickle.dumps(Call(subprocess.Popen, ["touch", str(ran)]), 2),
    "eval": lambda ran: pickle.dumps(Call(eval, program(ran)), 2),
    "exec": lambda ran: pickle.dumps(Call(exec, program(ran)), 2),
    "open": lambda ran: pickle.dumps(Call(open, str(ran), "w"), 2),
    "io.open": lambda ran: pickle.dumps(Call(io.open, str(ran), "w"), 4),
    "importlib.import_module": lambda ran: pickle.dumps(
        Call(importlib.import_module, "antigravity"), 2
    ),
    "__import__": lambda ran: global_call("builtins", "__import__", "antigravity"),
    "getattr": lambda ran: global_call("builtins", "getattr", "os", "system"),
    "pathlib.Path.touch": lambda ran: pickle.dumps(Call(Path.touch, ran), 4),
    "posix.system": lambda ran: global_call("posix", "system", f"touch {ran}"),
    "nt.system": lambda ran: global_call("nt", "system", f"touch {ran}"),
    "a dotted name": lambda ran: stack_global_call("os", "path.os.system", f"touch {ran}"),
    "a name on the stack": lambda ran: stack_global_call("os", "system", f"touch {ran}"),
    "torch.load": lambda ran: global_call("torch", "load", str(ran)),
    "torch.hub.load": lambda ran: global_call("torch.hub", "load", "evil/repo", "model"),
    "torch.jit.load": lambda ran: global_call("torch.jit", "load", str(ran)),
    "torch.save": lambda ran: pickle.dumps(Call(torch.save, {}, str(ran)), 2),
    "torch.ops.load_library": lambda ran: global_call("torch._ops", "load_library", str(ran)),
    "numpy.save": lambda ran: global_call("numpy", "save", str(ran), "x"),
    "runpy.run_path": lambda ran: global_call("runpy", "run_path", str(ran)),
    "pickle.loads": lambda ran: pickle.dumps(
        Call(pickle.loads, pickle.dumps(Call(os.mkdir, str(ran)), 2)), 2
    ),
    "the state of an object": lambda ran: pickle.dumps(
        State(partial, (os.mkdir, (ran,), {}, None))
    ),
    "a persistent id": lambda ran: b"\x80\x02cos\nsystem\nQ.",
    "an extension": lambda ran: b"\x80\x02\x82\x01.",
    "compress.cli.main": lambda ran: global_call("compress.cli", "main"),
    "the toolkit's own loader": lambda ran: global_call(
        "compress.checkpoint.loading", "read_state_dict", str(ran)
    ),
    "an instance by INST": lambda ran: f"(S'touch {ran}'\nios\nsystem\n.".encode(),
    "an object by OBJ": lambda ran: f"(cos\nsystem\nS'touch {ran}'\no.".encode(),
}
"""Pickles, given the path of what they would leave."""


def _zip(file: Path, raw: bytes, prefix: str = "archive", **more: bytes) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{prefix}/data.pkl", raw)
        archive.writestr(f"{prefix}/byteorder", b"little")
        archive.writestr(f"{prefix}/version", b"3\n")
        for name, content in more.items():
            archive.writestr(name, content)
    return file


def _oldest(file: Path, raw: bytes) -> Path:
    with tarfile.open(file, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    return file


def _old(file: Path, raw: bytes) -> Path:
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
    file.write_bytes(magic + pickle.dumps({"little_endian": True}, 2) + raw)
    return file


def _bare(file: Path, raw: bytes) -> Path:
    file.write_bytes(raw)
    return file


def _in_hugging_face_folder(file: Path, raw: bytes) -> Path:
    folder = file.with_name("folder")
    folder.mkdir()
    return _zip(folder / "pytorch_model.bin", raw).parent


def _sharded_bin(file: Path, raw: bytes) -> Path:
    folder = file.with_name("folder")
    folder.mkdir()
    _zip(folder / "part.bin", raw)
    index = {"weight_map": {"weight": "part.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def _distributed(file: Path, raw: bytes) -> Path:
    folder = file.with_name("checkpoint")
    folder.mkdir()
    (folder / ".metadata").write_bytes(raw)
    return folder


def _deepspeed(file: Path, raw: bytes) -> Path:
    folder = file.with_name("checkpoint")
    (folder / "global_step1").mkdir(parents=True)
    (folder / "latest").write_text("global_step1")
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        _zip(folder / "global_step1" / name, raw)
    return folder


CONTAINERS: dict[str, Callable[[Path, bytes], Path]] = {
    "model.pt": _zip,
    "model.ckpt": _zip,
    "old.pth": _old,
    "oldest.pt": _oldest,
    "bare.bin": _bare,
    "folder": _in_hugging_face_folder,
    "shards": _sharded_bin,
    "distributed": _distributed,
    "deepspeed": _deepspeed,
}


def _plant(folder: Path, container: str, planted: str) -> Path:
    raw = PLANTED[planted](folder / "ran")
    return CONTAINERS[container](folder / container, raw)


def _cases_of_pickles() -> dict[str, Case]:
    # Each pickle in the two commonest containers, and each container with every fourth pickle.
    cases: dict[str, Case] = {}
    for i, container in enumerate(CONTAINERS):
        for j, planted in enumerate(PLANTED):
            if container in ("model.pt", "bare.bin") or (i + j) % 4 == 0:
                name = f"{container}, calls {planted}"
                cases[name] = partial(_plant, container=container, planted=planted)
    return cases


def _sound(file: Path) -> bytes:
    torch.manual_seed(0)
    torch.save(torch.nn.Linear(4, 2).state_dict(), file)
    return file.read_bytes()


def _damaged(folder: Path, seed: int) -> Path:
    """Write a checkpoint with a few bytes changed, or cut."""
    chance = random.Random(seed)
    raw = bytearray(_sound(folder / "model.pt"))
    for _ in range(chance.choice((1, 2, 8))):
        raw[chance.randrange(len(raw))] = chance.randrange(256)
    if seed % 3 == 0:
        raw = raw[: chance.randrange(len(raw))]
    (folder / "model.pt").write_bytes(raw)
    return folder / "model.pt"


def _damaged_pickle(folder: Path, seed: int) -> Path:
    """Write a sound archive whose pickle has a few opcodes changed."""
    chance = random.Random(seed)
    _sound(folder / "model.pt")
    with zipfile.ZipFile(folder / "model.pt") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    (name,) = [name for name in members if name.endswith("data.pkl")]
    raw = bytearray(members[name])
    for _ in range(chance.choice((1, 2, 4))):
        raw[chance.randrange(len(raw))] = chance.choice(b"(.0123cRobiQ\x81\x82\x85\x93tu}]qrhj\x95")
    with zipfile.ZipFile(folder / "model.pt", "w") as archive:
        for each, content in members.items():
            archive.writestr(each, bytes(raw) if each == name else content)
    return folder / "model.pt"


def _archive(folder: Path, name: str) -> Path:
    """Write an archive whose directory lies in one way."""
    file = folder / "model.pt"
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("archive/data.pkl", b"0" * 1000)
        if name == "outside":
            archive.writestr("../../outside/secret.txt", b"0")
        elif name == "absolute":
            archive.writestr("/outside", b"0")
        elif name == "twice":
            archive.writestr("archive/data.pkl", b"1" * 1000)
        elif name == "link":
            info = zipfile.ZipInfo("archive/data/0")
            info.external_attr = (stat.S_IFLNK | 0o777) << 16
            archive.writestr(info, str(folder / "outside" / "secret.txt"))
        elif name == "large":
            archive.infolist()[0].file_size = 2**40
        elif name == "shared":
            archive.writestr("archive/data/0", b"0" * 1000)
            first, second = archive.infolist()
            second.header_offset = first.header_offset
    raw = bytearray(file.read_bytes())
    patches = {
        "later version": (6, b"\x63\0"),
        "no alphabet": (46, b"\xff"),
        "method": (10, b"\x63"),
    }
    if name in patches:
        offset, content = patches[name]
        start = raw.index(b"PK\1\2") + offset
        raw[start : start + len(content)] = content
    if name == "two ends":
        raw += b"PK\5\6" + bytes(18)
    file.write_bytes(raw)
    return file


ARCHIVES = (
    "outside", "absolute", "twice", "link", "large", "shared", "later version", "no alphabet",
    "method", "two ends",
)  # fmt: skip
ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HEADERS: dict[str, Any] = {
    "no object": [],
    "a number": 1,
    "no tensors": {},
    "shared bytes": {"w": ONE, "v": ONE},
    "a gap": {"w": ONE | {"data_offsets": [8, 16]}},
    "a terabyte": {"w": ONE | {"shape": [2 * 10**12]}},
    "a negative size": {"w": ONE | {"shape": [-1, -2]}},
    "offsets turned round": {"w": ONE | {"data_offsets": [8, 0]}},
    "an unknown type": {"w": ONE | {"dtype": "F33"}},
    "no type": {"w": {"shape": [2], "data_offsets": [0, 8]}},
    "a type that is a list": {"w": ONE | {"dtype": ["F32"]}},
    "a shape that is a text": {"w": ONE | {"shape": "22"}},
    "a size of 400 digits": {"w": ONE | {"shape": [10**400]}},
    "a size with a fraction": {"w": ONE | {"shape": [2.0]}},
    "a size that is true": {"w": ONE | {"shape": [True, 2]}},
    "a thousand dimensions": {"w": ONE | {"shape": [1] * 1000 + [2]}},
    "an escape sequence for a name": {"\x1b[2J\u202ew": ONE},
    "a name of a megabyte": {"w" * 2**20: ONE},
    "metadata that are no texts": {"__metadata__": {"a": [1]}, "w": ONE},
    "an unknown key": {"w": ONE | {"file": "../outside/secret.txt"}},
    "a path for a name": {"../../outside/secret": ONE},
}


def _header(folder: Path, name: str) -> Path:
    text = json.dumps(HEADERS[name]).encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    return file


INDEXES: dict[str, Any] = {
    "a path outside": {"weight_map": {"weight": "../outside/secret.txt"}},
    "an absolute path": {"weight_map": {"weight": "/etc/passwd"}},
    "itself": {"weight_map": {"weight": "model.safetensors.index.json"}},
    "the folder": {"weight_map": {"weight": "."}},
    "no text": {"weight_map": {"weight": 1}},
    "a list": {"weight_map": []},
    "no map": {},
    "a list for all": [],
    "a NUL": {"weight_map": {"weight": "a\0b"}},
    "a long name": {"weight_map": {"weight": "a" * 5000}},
    "lone surrogates": {"weight_map": {"weight": "\ud800"}},
    "escapes": {"weight_map": {"\x1b[2J": "\x1b[2J"}},
    "an empty name": {"weight_map": {"weight": ""}},
    "a URL": {"weight_map": {"weight": "https://example.com/x.safetensors"}},
}


def _index(folder: Path, name: str) -> Path:
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps(INDEXES[name]))
    return file


CASES: dict[str, Case] = {
    **_cases_of_pickles(),
    **{f"model.pt, bytes {seed}": partial(_damaged, seed=seed) for seed in range(24)},
    **{f"model.pt, opcodes {seed}": partial(_damaged_pickle, seed=seed) for seed in range(30)},
    **{f"model.pt, an archive with {name}": partial(_archive, name=name) for name in ARCHIVES},
    **{f"model.safetensors, {name}": partial(_header, name=name) for name in HEADERS},
    **{f"an index that names {name}": partial(_index, name=name) for name in INDEXES},
}
