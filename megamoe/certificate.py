"""Certificates: which backend a machine has proven with `megamoe certify`, and where they lie.

A certificate is of one backend on one machine: GPU, driver, Triton and the bytes of this package.
`find` gives it where all of that is as it was, and otherwise says by name what is not. Standard
library only; `megamoe/certify` makes them, `engine/certified.py` asks for them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from megamoe.errors import FileError
from megamoe.files import write_atomic

KIND, VERSION = "megamoe.certificate", 1
# Packages whose bytes decide what a call computes, beside the files at the root (problem.py has
# limits and clamps): a change in one of them ends a certificate.
PACKAGES = ("formats", "routing", "layout", "planner", "kernels", "engine")
ANEW = "run `megamoe certify` again"


@dataclass(frozen=True, slots=True)
class Machine:
    """What a certificate holds for; every field must be as it was."""

    gpu: str  # as CUDA names it; of a CPU its architecture
    capability: str  # "9.0"; "cpu"
    driver: str  # of the GPU; "none" on a CPU
    triton: str
    torch: str
    megamoe: str  # version of this package
    code: str  # `code_digest` of this package

    def unlike(self, now: Machine) -> str:
        """What is not as it was, by name; "" where all is."""
        changed = [
            f"{field.name} was {then}, is {this}"
            for field in fields(self)
            if (then := getattr(self, field.name)) != (this := getattr(now, field.name))
        ]
        return "; ".join(changed)


@dataclass(frozen=True, slots=True)
class Certificate:
    """That a backend passed every check on a machine."""

    backend: str
    machine: Machine
    label: str  # how it ran: "run" (on a GPU), "interpreted" or "on the CPU"
    recipes: tuple[str, ...]
    checks: tuple[str, ...]
    commit: str
    date: str

    def __str__(self) -> str:
        return (
            f"{len(self.checks)} checks {self.label}, {self.date}, commit {self.commit}: "
            f"{', '.join(self.recipes)}"
        )


def folder() -> Path:
    """Where certificates of this user lie, as the XDG base directories say."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "megamoe" / "certificates"


def path_of(backend: str, machine: Machine) -> Path:
    """The file of one backend on one kind of GPU."""
    words = f"{backend}-{machine.gpu}-{machine.capability}".lower()
    return folder() / (re.sub(r"[^a-z0-9.]+", "-", words) + ".json")


def write(certificate: Certificate) -> Path:
    """Keep a certificate in place of an older one."""
    path = path_of(certificate.backend, certificate.machine)
    text = json.dumps({"kind": KIND, "version": VERSION, **asdict(certificate)}, indent=2)
    write_atomic(path, text + "\n")
    return path


def remove(backend: str, machine: Machine) -> None:
    """Take back a certificate, if there is one: the machine has failed a check."""
    with suppress(FileNotFoundError):
        path_of(backend, machine).unlink()


def read(path: Path) -> Certificate:
    """The certificate in a file, or FileError."""
    try:
        data = json.loads(path.read_text())
        if (data.pop("kind"), data.pop("version")) != (KIND, VERSION):
            raise ValueError(f"not a {KIND} of version {VERSION}")
        machine = Machine(**data.pop("machine"))
        recipes, checks = (tuple(data.pop(name)) for name in ("recipes", "checks"))
        return Certificate(machine=machine, recipes=recipes, checks=checks, **data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{path} must be a certificate; got {error}; {ANEW}") from error


def find(
    backend: str, machine: Machine, recipe: str | None = None
) -> tuple[Certificate | None, str]:
    """(the certificate of `backend` on `machine`, ""), or (None, why there is none that holds).

    recipe  also require that this recipe was checked
    """
    path = path_of(backend, machine)
    if not path.is_file():
        return None, f"no certificate of backend {backend} on {machine.gpu}: run `megamoe certify`"
    try:
        certificate = read(path)
    except FileError as error:
        return None, str(error)
    changed = certificate.machine.unlike(machine)
    if changed:
        return None, f"the certificate of {certificate.date} is stale: {changed}; {ANEW}"
    if certificate.backend != backend:
        return None, f"{path} is of backend {certificate.backend}, not {backend}; {ANEW}"
    if recipe is not None and recipe not in certificate.recipes:
        return None, f"the certificate of {certificate.date} is not of recipe {recipe}; {ANEW}"
    return certificate, ""


@functools.cache
def code_digest() -> str:
    """Twelve digits that stand for the Python files of PACKAGES and the root, as on disk."""
    root, digest = Path(__file__).parent, hashlib.sha256()
    paths = sorted(root.glob("*.py"))
    for package in PACKAGES:
        paths += sorted((root / package).rglob("*.py"))
    for path in paths:
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
