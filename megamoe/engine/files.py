"""The file of ExpertWeights: safetensors with a little metadata, written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from megamoe.errors import DeviceError, FileError, require
from megamoe.files import replacing

FILE_KIND, FILE_VERSION = "megamoe.ExpertWeights", "1"


def save(path: str | Path, tensors: dict[str, Tensor], recipe: str) -> None:
    """Write beside the target, then move it into place; links are followed."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    parent = Path(os.path.realpath(path)).parent
    require(parent.is_dir(), "the folder must exist", got=parent, kind=FileError)
    metadata = {"kind": FILE_KIND, "version": FILE_VERSION, "recipe": recipe}
    try:
        with replacing(path) as part:
            save_file({n: t.contiguous() for n, t in tensors.items()}, part, metadata=metadata)
    except FileError:
        raise
    except (SafetensorError, OSError) as error:
        raise FileError(f"the file must be writable; got {path} ({error})") from error


def load(path: str | Path, device: torch.device | str) -> tuple[dict[str, Tensor], str]:
    """Tensors and recipe of a file that `save` wrote."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    require(path.is_file(), "the file must exist", got=path, kind=FileError)
    where = torch.device(device)
    require(
        where.type != "cuda" or torch.cuda.is_available(),
        "device must be one that this torch has",
        got=device,
        fix='use device="cpu"',
        kind=DeviceError,
    )
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise FileError(
            f"the file must be a whole safetensors file; got {path} ({error}); "
            "copy or write it again"
        ) from error
    require(
        metadata.get("kind") == FILE_KIND,
        f"the file must be one that ExpertWeights.save wrote (metadata kind {FILE_KIND})",
        got=f"{path} with metadata {metadata}",
        fix="load a checkpoint's tensors yourself and use ExpertWeights.from_quantized",
        kind=FileError,
    )
    require(
        metadata.get("version") == FILE_VERSION,
        f"the file must have version {FILE_VERSION}",
        got=metadata.get("version"),
        kind=FileError,
    )
    return tensors, metadata.get("recipe", "")
