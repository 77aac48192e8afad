"""Certificates: what they hold for, how they go stale, and what `auto` takes with and without."""

from dataclasses import replace

import pytest
import torch

from megamoe import certificate
from megamoe.certificate import Certificate, Machine
from megamoe.engine import backends, certified
from megamoe.engine.functional import choose
from megamoe.engine.weights import ExpertWeights
from megamoe.errors import FileError, NotAvailable
from megamoe.hardware import Hardware
from megamoe.planner import plan as planner
from megamoe.planner.call import CallSpec
from megamoe.planner.plan import choose_backend
from megamoe.problem import Problem

HERE = Machine("NVIDIA B200", "10.0", "580.1", "3.6.0", "2.11.0", "0.1.0", "0123456789ab")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


def a_certificate(machine=HERE, backend="blackwell", recipes=("w4a8", "w4a4")):
    return Certificate(backend, machine, "run", recipes, ("products: w4a8",), "abc", "2026-11-18")


def test_a_certificate_is_found_where_it_was_written_for(home):
    path = certificate.write(a_certificate())
    assert path.is_relative_to(home) and path.name == "blackwell-nvidia-b200-10.0.json"
    assert certificate.find("blackwell", HERE) == (a_certificate(), "")
    assert certificate.find("blackwell", HERE, "w4a8")[1] == ""
    assert "not of recipe nvfp4" in certificate.find("blackwell", HERE, "nvfp4")[1]
    certificate.remove("blackwell", HERE)
    assert certificate.find("blackwell", HERE)[1].startswith("no certificate of backend blackwell")


@pytest.mark.parametrize("field", ["driver", "triton", "torch", "megamoe", "code"])
def test_a_stale_certificate_is_refused_by_name(field):
    certificate.write(a_certificate())
    now = replace(HERE, **{field: "other"})
    found, why = certificate.find("blackwell", now)
    assert found is None
    assert f"stale: {field} was {getattr(HERE, field)}, is other; run `megamoe certify`" in why


def test_another_gpu_has_no_certificate_and_a_renamed_file_none_either():
    path = certificate.write(a_certificate())
    other = replace(HERE, gpu="NVIDIA B300", capability="10.3")
    assert (
        "no certificate of backend blackwell on NVIDIA B300"
        in (certificate.find("blackwell", other)[1])
    )
    path.rename(certificate.path_of("blackwell", other))
    assert "gpu was NVIDIA B200, is NVIDIA B300" in certificate.find("blackwell", other)[1]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "other", "version": 1}', "{}"])
def test_a_damaged_file_is_no_certificate_and_no_crash(text):
    path = certificate.write(a_certificate())
    path.write_text(text)
    found, why = certificate.find("blackwell", HERE)
    assert found is None and "must be a certificate" in why
    with pytest.raises(FileError):
        certificate.read(path)


def test_the_digest_is_of_the_bytes_that_compute(monkeypatch, tmp_path):
    assert len(certificate.code_digest()) == 12
    assert certified.machine_of(CPU).code == certificate.code_digest()
    monkeypatch.setattr(certificate, "__file__", str(tmp_path / "certificate.py"))
    seen = set()
    for name in ("problem.py", "kernels/gemm.py", "engine/call.py"):  # problem.py: clamps
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("LIMIT = 7.0")
        seen.add(certificate.code_digest.__wrapped__())
        (tmp_path / name).write_text("LIMIT = 8.0")
        seen.add(certificate.code_digest.__wrapped__())
    assert len(seen) == 6


THERE = {"blackwell": "", "portable": "", "reference": ""}


@pytest.fixture
def blackwell(monkeypatch):
    """The opt-in backend before the others, on a CPU that is taken for its GPU."""
    row = backends.Backend("blackwell", lambda device: "", "not yet run")
    others = tuple(one for one in backends.BACKENDS if one.name != "blackwell")
    monkeypatch.setattr(backends, "BACKENDS", (row, *others))
    modes = {**planner.BACKEND_MODES, "blackwell": ("staged", "fused")}
    monkeypatch.setattr(planner, "BACKEND_MODES", modes)


def test_auto_takes_an_opt_in_backend_only_with_a_certificate(blackwell):
    name, why = choose_backend("auto", "auto", THERE)
    assert name == "portable" and "blackwell is opt-in: no certificate" in why
    assert choose_backend("auto", "auto", THERE, not_certified="") == ("blackwell", "")
    assert choose_backend("blackwell", "auto", THERE) == ("blackwell", "")  # asked by name
    with pytest.raises(NotAvailable, match="blackwell cannot run here"):
        choose_backend("blackwell", "auto", {**THERE, "blackwell": "needs sm_100a"})


def test_the_plan_has_the_trait_and_without_it_b200_is_portable(blackwell, monkeypatch):
    calls = []
    monkeypatch.setattr(planner, "reasons_on", lambda arch: THERE)
    monkeypatch.setattr(
        planner, "choose_backend",
        lambda *given: calls.append(given[-1]) or choose_backend("portable", "auto", THERE),
    )  # fmt: skip
    problem = Problem(8, 512, 256, 8, 2, 1, "w4a8")
    for is_certified in (False, True):
        planner.plan(CallSpec(problem, is_certified=is_certified), Hardware.named("b200"))
    assert calls[0].startswith("no certificate") and calls[1] == ""


def test_the_engine_asks_for_the_certificate_of_its_device_and_recipe(blackwell):
    first = backends.BACKENDS[1].name
    assert backends.resolve("auto", "auto", CPU).name == "reference" != first
    machine = certified.machine_of(CPU)
    certificate.write(a_certificate(machine))
    assert backends.resolve("auto", "auto", CPU, "w4a8").name == "blackwell"
    assert backends.resolve("auto", "auto", CPU, "bf16").name == "reference"
    certificate.write(a_certificate(replace(machine, driver="older")))
    assert backends.resolve("auto", "auto", CPU, "w4a8").name == "reference"


def test_auto_passes_over_what_the_opt_in_backend_has_no_certificate_or_kernel_for(blackwell):
    certificate.write(a_certificate(certified.machine_of(CPU), recipes=("w4a8", "w4a16")))

    def chosen(recipe="w4a8", shared=None, activation="swiglu", code=None):
        w, other = (
            None if name is None else ExpertWeights.empty(name, 2, 64, 32)
            for name in (recipe, shared)
        )
        if code is not None:
            w.w2.data.fill_(0x11)
            w.w2.scale.fill_(code)
        return choose("auto", "auto", w, other, activation)[::2]

    assert chosen() == chosen(shared="w4a8") == chosen("w4a16", code=1) == ("blackwell", "")
    for given, reason in (
        ({"shared": "bf16"}, "not of recipe bf16"),
        ({"activation": "geglu"}, "no kernel for activation geglu"),
        ({"recipe": "w4a16", "code": 0}, "a scale of 2**-127"),
    ):
        name, why = chosen(**given)
        assert name == "reference" and reason in why


def test_doctor_shows_certificates_and_why_one_does_not_hold(blackwell):
    def lines():
        return [f for f in backends.doctor().findings if f.name == "certificate blackwell"]

    (none,) = lines()
    assert not none.ok and "no certificate of backend blackwell" in none.detail
    certificate.write(a_certificate(certified.machine_of(CPU)))
    (there,) = lines()
    assert there.ok and "cpu: 1 checks run, 2026-11-18" in there.detail
    assert backends.doctor().best["cpu"] == "blackwell"


def test_where_nothing_is_opt_in_no_certificate_is_asked_for(monkeypatch):
    monkeypatch.setattr(certified, "machine_of", lambda device: pytest.fail("asked"))
    assert backends.resolve("auto", "auto", CPU, "w4a8").name == "reference"
    assert not certified.is_certified(CPU, "sm_90a", "w4a8")


def test_the_driver_is_read_off_the_kernel_module(monkeypatch, tmp_path):
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
    file = tmp_path / "version"
    file.write_text(text)
    monkeypatch.setattr(certified, "DRIVER_FILE", file)
    assert certified.driver_version.__wrapped__() == "580.159.04"
