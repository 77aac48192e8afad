"""Run the checks in order, each bounded in time; the report, and the certificate it allows.

On a GPU the checks run in a process of their own: a kernel that never ends, or that breaks the CUDA
context, is then a failed check with a name and not a hung command. The first stage with a failed
check is finished, those after it are not begun.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from megamoe import certificate
from megamoe.bench.provenance import commit, provenance
from megamoe.certificate import Certificate, Machine
from megamoe.certify.ahead import compile_ahead
from megamoe.certify.checks import STAGES, Failed, all_checks
from megamoe.certify.target import Target
from megamoe.engine import backends
from megamoe.engine.certified import machine_of
from megamoe.errors import MegaMoEError, NotAvailable, require
from megamoe.planner.numerics import not_on
from megamoe.problem import RECIPES

CHECK_S = 600.0  # bound of one check on a GPU, compiling included

Progress = Callable[[str, int, int], None]  # stage, checks done, of


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: whether it held, and what was found."""

    stage: str
    name: str
    ok: bool
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Report:
    """All that a run found, to be read and to be sent to us."""

    backend: str
    label: str  # how it ran: "run", "interpreted" or "on the CPU"
    is_quick: bool
    machine: Machine
    provenance: str
    commit: str
    date: str
    recipes: tuple[str, ...]
    findings: tuple[Finding, ...]
    not_run: int  # checks after the first stage that failed

    @property
    def ok(self) -> bool:
        """Whether every check was run and held."""
        return bool(self.findings) and not self.not_run and all(one.ok for one in self.findings)

    @property
    def failed(self) -> tuple[Finding, ...]:
        return tuple(one for one in self.findings if not one.ok)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "megamoe.certify", "ok": self.ok, **asdict(self)}

    def certificate(self) -> Certificate | None:
        """What this run allows: nothing if a check failed, or if it was a quick one."""
        if not self.ok or self.is_quick:
            return None
        checks = tuple(f"{one.stage}: {one.name}" for one in self.findings)
        return Certificate(
            self.backend, self.machine, self.label, self.recipes, checks, self.commit, self.date
        )


def certify(target: Target, progress: Progress = lambda stage, done, of: None) -> Report:
    """Run every check of `target`; nothing is written."""
    why = backends.reasons_on(target.device).get(target.backend, "there is no such backend")
    require(
        not why,
        f"backend {target.backend} cannot run on {target.device} ({why})",
        got=f"--device {target.device}",
        fix="`megamoe doctor` says what works here",
        kind=NotAvailable,
    )
    names = [(check.stage, check.name) for check in all_checks(target)]
    total, findings = len(names), []
    if target.is_gpu:
        compile_ahead(target, partial(progress, "compile"))
    source = _apart(target, names) if target.is_gpu else _here(target)
    bad_stage = ""
    for finding in source:
        if bad_stage and finding.stage != bad_stage:
            break
        findings.append(finding)
        bad_stage = bad_stage or ("" if finding.ok else finding.stage)
        progress(finding.stage, len(findings), total)
    return Report(
        backend=target.backend,
        label=target.label,
        is_quick=target.is_quick,
        machine=machine_of(target.device),
        provenance=provenance(target.device),
        commit=commit(),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        recipes=target.recipes,
        findings=tuple(findings),
        not_run=total - len(findings),
    )


def keep(report: Report) -> str:
    """Write the certificate of a report, or take back an older one; says which."""
    proof = report.certificate()
    if proof is not None:
        return f"certificate written to {certificate.write(proof)}"
    if report.is_quick and report.ok:
        return "no certificate: a quick run certifies nothing"
    certificate.remove(report.backend, report.machine)
    return "no certificate: a check failed"


def _here(target: Target) -> Iterator[Finding]:
    """The checks one by one, in this process."""
    bad_stage = ""
    for check in all_checks(target):
        if bad_stage and check.stage != bad_stage:
            return
        began = time.perf_counter()
        try:
            ok, detail = True, check.run()
        except Failed as failed:
            ok, detail = False, str(failed)
        except MegaMoEError as error:
            ok, detail = False, f"{type(error).__name__}: {error}"
        except Exception as error:
            ok, detail = False, f"{type(error).__name__}: {str(error).strip()[:2000]}"
        bad_stage = bad_stage or ("" if ok else check.stage)
        seconds = round(time.perf_counter() - began, 3)
        yield Finding(check.stage, check.name, ok, detail, seconds)


def _child(pipe: Connection, target: Target) -> None:
    for finding in _here(target):
        pipe.send(finding)
    pipe.send(None)


def _apart(target: Target, names: list[tuple[str, str]]) -> Iterator[Finding]:
    """The checks in a process of their own, which is ended where one takes too long."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(there, target), daemon=True)
    child.start()
    there.close()
    done = 0
    try:
        while True:
            began = time.perf_counter()
            came = here.poll(CHECK_S)
            try:
                message = here.recv() if came else None
            except EOFError:
                child.join()
                why = f"the process ended with exit code {child.exitcode}"
                yield Finding(*names[done], False, why, round(time.perf_counter() - began, 3))
                return
            if not came:
                why = f"did not end in {CHECK_S:.0f} s: a wait without a bound, or a lost barrier"
                yield Finding(*names[done], False, why, CHECK_S)
                return
            if message is None:
                return
            done += 1
            yield message
    finally:
        here.close()
        if child.is_alive():
            child.kill()
        child.join()


def recipes_of(backend: str) -> tuple[str, ...]:
    """Those that a backend computes: Hopper and Blackwell have no kernel for some."""
    return tuple(recipe for recipe in RECIPES if not not_on(backend, recipe))


def with_recipes(target: Target, recipes: tuple[str, ...]) -> Target:
    """The target with some of its recipes: its certificate is of those alone."""
    for recipe in recipes:
        require(
            recipe in target.recipes,
            f"backend {target.backend} certifies {', '.join(target.recipes)}",
            got=recipe,
            kind=NotAvailable,
        )
    return replace(target, recipes=recipes) if recipes else target


def on(backend: str, device: str, *, is_quick: bool = False) -> Target:
    """A target by name; `auto` is the best backend that works, opt-in ones included."""
    where = torch.device(device)
    name = backend
    if backend == "auto":
        name = next(one for one, why in backends.reasons_on(where).items() if not why)
    return Target(name, where, recipes_of(name), is_quick=is_quick)


assert STAGES  # the order of the report
