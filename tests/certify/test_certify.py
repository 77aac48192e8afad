"""`megamoe certify`: right backends pass, wrong ones are refused a certificate."""

import json
import os
from dataclasses import replace

import pytest
import torch

from megamoe import certificate, reference
from megamoe.certify import run
from megamoe.certify.checks import STAGES, all_checks
from megamoe.certify.target import SMALL, Target
from megamoe.engine import backends
from megamoe.engine.certified import machine_of
from megamoe.problem import Options
from tests import emulator, pretending
from tests.kernels.support import INTERPRETED

CPU = torch.device("cpu")
TINY = replace(SMALL, layers=(3,), gemms=(4,), num_soak=6)


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def there(monkeypatch):
    """A CPU on which every backend is said to work."""
    rows = tuple(replace(b, why_not=lambda device: "") for b in backends.BACKENDS)
    monkeypatch.setattr(backends, "BACKENDS", rows)


def right(x, idx, gates, weights, *, shared=None, backend, mode, **options):
    return reference.moe(x, idx, gates, weights, Options(**options), shared)


def pretended(call, **given):
    """A backend with every stage that a CPU can run, which computes by `call`."""
    return Target("hopper", CPU, ("w4a8",), call=call, own_sizes=TINY, **given)


# -- wrong kernels -------------------------------------------------------------------------------


class Launches:
    num = 0


def rows_left_out(*inputs, **rest):
    y = right(*inputs, **rest)
    y[len(y) // 2 :] = 0
    return y


def columns_left_out(x, idx, gates, weights, **rest):
    x = x.clone()
    x[:, -32:] = 0
    return right(x, idx, gates, weights, **rest)


def narrow_sums(*inputs, **rest):
    """Sums that lose what is small against the terms: the result in units of 1/64 of them."""
    y = right(*inputs, **rest)
    size = y.abs().max().float()
    return ((y.float() + 64 * size).bfloat16().float() - 64 * size).bfloat16()


def masks_ignored(x, idx, gates, weights, **rest):
    return right(x, idx.clamp_min(0), gates, weights, **rest)


def repeats_once(x, idx, gates, weights, **rest):
    repeated = idx[:, 1:] == idx[:, :1]
    idx = torch.cat([idx[:, :1], idx[:, 1:].masked_fill(repeated, -1)], dim=1)
    return right(x, idx, gates, weights, **rest)


def shared_forgotten(*inputs, shared=None, **rest):
    return right(*inputs, **rest)


def one_activation(*inputs, **rest):
    return right(*inputs, **{**rest, "activation": "swiglu"})


def biases_forgotten(x, idx, gates, weights, **rest):
    return right(x, idx, gates, replace(weights, b13=None, b2=None), **rest)


def batch_seen(*inputs, **rest):
    y = right(*inputs, **rest)
    return y if len(y) == 1 else (y.view(torch.int16) ^ (y != 0)).view(torch.bfloat16)


def fused_other(*inputs, mode, **rest):
    y = right(*inputs, mode=mode, **rest)
    return (y.view(torch.int16) ^ (y != 0)).view(torch.bfloat16) if mode == "fused" else y


def rarely_wrong(*inputs, **rest):
    Launches.num += 1
    y = right(*inputs, **rest)
    if Launches.num % 5 == 0 and len(y) == 2:  # a batch of the soak
        y[0, 0] = (y[0, :1].view(torch.int16) ^ 1).view(torch.bfloat16)
    return y


def crashes(*inputs, **rest):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("planted", "stage"),
    [
        (rows_left_out, "products"),
        (columns_left_out, "products"),
        (narrow_sums, "products"),
        (masks_ignored, "layers"),
        (repeats_once, "layers"),
        (shared_forgotten, "layers"),
        (one_activation, "layers"),
        (biases_forgotten, "layers"),
        (fused_other, "bits"),
        (crashes, "products"),
    ],
    ids=lambda v: getattr(v, "__name__", v),
)
def test_a_planted_wrong_kernel_is_refused_a_certificate(there, planted, stage):
    target = pretended(planted)
    certificate.write(_of(target))  # an older one, which must not stay
    report = run.certify(target)
    assert not report.ok and report.failed[0].stage == stage and report.not_run
    assert report.certificate() is None
    assert run.keep(report) == "no certificate: a check failed"
    assert certificate.find("hopper", machine_of(CPU))[0] is None


@pytest.mark.parametrize("planted", [batch_seen, rarely_wrong], ids=["batch", "race"])
def test_bits_that_change_are_seen_however_small(there, planted):
    Launches.num = 0
    report = run.certify(pretended(planted))
    assert not report.ok and {one.stage for one in report.failed} <= {"bits", "soak"}


def _of(target):
    found = run.certify(replace(target, call=right))
    assert found.ok, found.failed
    return found.certificate()


# -- right ones ----------------------------------------------------------------------------------


def test_a_right_backend_gets_a_certificate_and_a_quick_run_none(there):
    report = run.certify(pretended(right))
    assert report.ok and "certificate written to" in run.keep(report)
    found, why = certificate.find("hopper", machine_of(CPU), "w4a8")
    assert why == "" and len(found.checks) == len(report.findings) and found.recipes == ("w4a8",)
    assert "not of recipe bf16" in certificate.find("hopper", machine_of(CPU), "bf16")[1]
    quick = run.certify(pretended(right, is_quick=True))
    assert quick.ok and quick.certificate() is None
    assert run.keep(quick) == "no certificate: a quick run certifies nothing"
    assert certificate.find("hopper", machine_of(CPU))[0] == found  # a quick pass takes none back


def test_stages_come_in_the_order_in_which_they_lean_on_each_other():
    order = list(dict.fromkeys(check.stage for check in all_checks(pretended(right))))
    assert order == [stage for stage in STAGES if stage in order]
    assert {"oracle", "products", "layers", "soak"} <= set(order)
    names = [(c.stage, c.name) for c in all_checks(pretended(right))]
    assert len(names) == len(set(names))


def test_the_oracle_is_not_held_against_itself():
    stages = {check.stage for check in all_checks(Target("reference", CPU))}
    assert stages == {"oracle", "formats", "products", "sums", "bits"}


def test_a_wrong_oracle_is_seen_by_the_rules(monkeypatch, there):
    true = reference.moe
    monkeypatch.setattr(
        reference, "moe", lambda x, idx, gates, *rest: true(x, idx, gates * 1.01, *rest)
    )
    report = run.certify(pretended(right))
    assert report.failed[0].stage == "oracle"


def test_on_a_cpu_the_command_certifies_the_reference_end_to_end(megamoe, home, tmp_path):
    file = tmp_path / "report.json"
    args = ("certify", "--backend", "reference", "--recipe", "w4a8", "--recipe", "nvfp4")
    code, out, _ = megamoe(*args, "--out", str(file))
    assert code == 0 and "every check held" in out and "says nothing of any GPU" in out
    saved = json.loads(file.read_text())
    assert saved["ok"] and saved["recipes"] == ["w4a8", "nvfp4"] and saved["provenance"]
    assert {"gpu", "driver", "triton", "code"} <= set(saved["machine"])
    assert "certificate reference" in megamoe("doctor")[1]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--backend", "hopper"), 3, "cannot run on cpu"),
        (("--backend", "emulator"), 3, "part of the tests"),
        (("--backend", "cray"), 2, "backend must be one of"),
        (("--recipe", "w1a1"), 2, "recipe must be one of"),
    ],
)
def test_what_cannot_be_certified_is_refused_by_name(megamoe, args, code, words):
    found, _, err = megamoe("certify", *args)
    assert found == code and words in err


def test_a_failed_check_is_exit_code_1(megamoe, monkeypatch):
    from megamoe.certify import checks

    monkeypatch.setattr(checks, "_product", lambda *_: checks.held(1.0, 0.0))
    code, out, _ = megamoe("certify", "--backend", "reference", "--recipe", "w4a8")
    assert code == 1 and "FAILED products" in out and "not bit for bit" in out


def exits(*inputs, **rest):
    os._exit(9)


def test_a_process_that_dies_is_a_failed_check_with_a_name(there):
    target = pretended(exits)
    names = [(check.stage, check.name) for check in all_checks(target)]
    found = list(run._apart(target, names))
    assert all(one.ok for one in found[:-1]) and not found[-1].ok
    assert found[-1].stage == "products" and "exit code 9" in found[-1].detail


def test_a_check_that_never_ends_is_a_failed_one(there, monkeypatch):
    monkeypatch.setattr(run, "CHECK_S", 0.0)
    target = pretended(right)
    found = list(run._apart(target, [(c.stage, c.name) for c in all_checks(target)]))
    assert not found[-1].ok and "did not end in 0 s" in found[-1].detail


# -- the emulator --------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")
def test_the_hopper_kernels_pass_in_the_emulator(there, monkeypatch):
    """The very kernels, on a CPU: what `certify` checks on a GPU, but for what only that shows."""
    emulator.install(monkeypatch)

    def emulated(x, idx, gates, weights, *, shared=None, backend, mode, **options):
        one = pretending.fuse if mode == "fused" else pretending.staged
        return one((x, idx, gates), weights, Options(**options), shared=shared)

    small = replace(TINY, num_soak=2, long_k=128)
    target = Target("hopper", CPU, ("w4a8_block",), call=emulated, own_sizes=small)
    report = run.certify(target)
    assert report.ok, report.failed
