"""Safetensors files read a tensor, or some of its leading entries, at a time; nothing is mapped."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megamoe.errors import DTypeError, FileError, require

DTYPES = {
    "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8,
    "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu, "F64": torch.float64, "BOOL": torch.bool,
}  # fmt: skip
MAX_HEADER = 100 << 20  # the format's own limit
INDEX = "model.safetensors.index.json"


class Entry(NamedTuple):
    """Where a tensor lies."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte in the file


class Shards:
    """The tensors of a folder by name.

    With an index, a shard's header is read when the first of its tensors is asked for. Without one
    a tensor that two files have is refused: they may be halves, of a tensor-parallel checkpoint.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        require(self.folder.is_dir(), "the folder must exist", got=self.folder, kind=FileError)
        index = self.folder / INDEX
        self._files: dict[str, Path] = {}
        self._entries: dict[str, Entry] = {}
        self._others: dict[str, Path] = {}  # a second file with the same name
        if index.is_file():
            for name, file in read_json(index).get("weight_map", {}).items():
                self._files[name] = self.folder / file
        else:
            for file in sorted(self.folder.glob("*.safetensors")):
                entries = _header(file)
                self._others |= {name: self._files[name] for name in entries if name in self._files}
                self._entries |= entries
                self._files |= dict.fromkeys(entries, file)
        require(
            bool(self._files),
            "the folder must hold safetensors files, or an index of them",
            got=self.folder,
            kind=FileError,
        )

    @property
    def names(self) -> list[str]:
        """All tensors."""
        return list(self._files)

    def entry(self, name: str) -> Entry:
        """Dtype, shape and place of a tensor."""
        require(
            name in self._files, "the checkpoint must have all tensors of its layers",
            got=f"no {name} in {self.folder}", kind=FileError,
        )  # fmt: skip
        require(
            name not in self._others, "a tensor must be in one file, or an index say in which",
            got=f"{name} in {self._others.get(name)} and {self._files[name].name}",
            fix="merge tensor-parallel shards first; of two copies take one out of the folder",
            kind=FileError,
        )  # fmt: skip
        if name not in self._entries:
            self._entries |= _header(self._files[name])
            require(
                name in self._entries, "a shard must hold what the index says",
                got=f"no {name} in {self._files[name]}", kind=FileError,
            )  # fmt: skip
        return self._entries[name]

    def read(self, name: str, idx: int | None = None) -> Tensor:
        """A tensor, or its entry `idx`, on the CPU."""
        entry = self.entry(name)
        require(
            entry.dtype in DTYPES,
            f"{name} must have one of the dtypes {', '.join(DTYPES)}",
            got=entry.dtype,
            kind=DTypeError,
        )
        dtype, shape, start = DTYPES[entry.dtype], entry.shape, entry.start
        if idx is not None:
            shape = shape[1:]
            start += idx * math.prod(shape) * dtype.itemsize
        num_bytes = math.prod(shape) * dtype.itemsize
        data = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        with entry.file.open("rb") as file:
            file.seek(start)
            got = file.readinto(memoryview(data.numpy()))  # type: ignore[arg-type]
        _check_whole(got == len(data), entry.file, f"{name} ends early")
        return data.view(dtype).view(shape)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or a FileError that names the file."""
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FileError(f"{path.name} must be readable JSON; got {path} ({error})") from error
    require(isinstance(read, dict), f"{path.name} must be an object", got=path, kind=FileError)
    return read  # type: ignore[no-any-return]


def _header(path: Path) -> dict[str, Entry]:
    require(path.is_file(), "a shard must exist", got=path, kind=FileError)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        _check_whole(8 + length <= size and length <= MAX_HEADER, path, "its header ends early")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise FileError(f"{path} must have a header of JSON; got {error}") from error
    header.pop("__metadata__", None)
    entries = {}
    for name, about in header.items():
        first, end = about["data_offsets"]
        _check_whole(8 + length + end <= size, path, f"{name} ends early")
        shape = tuple(about["shape"])
        entries[name] = Entry(path, about["dtype"], shape, 8 + length + first)
    return entries


def _check_whole(ok: bool, path: Path, got: str) -> None:
    require(
        ok, "the file must be a whole safetensors file", got=f"{path}: {got}",
        fix="copy or download it again", kind=FileError,
    )  # fmt: skip
