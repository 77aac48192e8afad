"""What `megamoe certify` does on a GPU alone, on a CPU that it takes for one."""

from dataclasses import dataclass, replace

import pytest
import torch

from megamoe.certify import ahead, checks, gpu_checks, run
from megamoe.certify.checks import CASES, Failed, all_checks
from megamoe.certify.target import GPU, SMALL, Target
from megamoe.engine import backends, status
from megamoe.engine.local import LocalRanks
from megamoe.engine.recording import cubins_of_all, recorded, target_of
from megamoe.errors import NotAvailable
from megamoe.formats.spec import FORMATS
from megamoe.hardware import B200, H200
from megamoe.planner.numerics import BLACKWELL_RECIPES, HOPPER_RECIPES
from tests import emulator, pretending
from tests.kernels.support import INTERPRETED

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NO_GLUON = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter knows no Gluon")
TINY = replace(SMALL, hidden=128, num_experts=8, long_k=128, layers=(3,), gemms=(4,), num_soak=2)


@dataclass(frozen=True)
class OnGpu(Target):
    """Takes the CPU for a GPU."""

    @property
    def is_gpu(self):
        return True


class Blind(OnGpu):
    """Compares nothing."""

    def wanted(self, inputs, *rest, **options):
        return torch.zeros_like(inputs[0])


@pytest.fixture
def there(monkeypatch):
    """A CPU on which every backend is said to work; its calls are eager."""
    rows = tuple(replace(b, why_not=lambda device: "") for b in backends.BACKENDS)
    monkeypatch.setattr(backends, "BACKENDS", rows)
    monkeypatch.setattr(status, "_BY_STREAM", {})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


@NO_GLUON
@pytest.mark.parametrize(("recipe", "stages"), [
    ("w4a8_block", {"gemms", "graphs", "ranks", "waits", "soak"}),
    ("bf16", {"products", "layers", "bits"}),
])  # fmt: skip
def test_the_checks_of_a_gpu_pass_on_the_emulator(there, monkeypatch, recipe, stages):
    """Bit for bit where a GPU must be: the emulator's BF16 rounds as a GPU's does."""
    kernels, make = emulator.install(monkeypatch, num_sms=4), LocalRanks._make_buffers

    def reached_by_address(ranks, num_tokens):
        make(ranks, num_tokens)
        kernels["mega_kernel"].hold = [buffer.tokens for buffer in ranks._buffers]

    monkeypatch.setattr(LocalRanks, "_make_buffers", reached_by_address)
    monkeypatch.setattr(gpu_checks, "COUNTS", (1, 9))
    monkeypatch.setattr(checks, "SOAK_TOKENS", (8, 3))
    target = OnGpu("hopper", CPU, (recipe,), own_sizes=TINY)
    found = {c.name: c.run() for c in all_checks(target) if c.stage in stages}
    assert len(found) == {"w4a8_block": 7, "bf16": 18}[recipe]
    if recipe == "w4a8_block":
        assert "waited too long for the end of all ranks" in found["an absent rank"]


@NO_GLUON
@pytest.mark.parametrize(("backend", "recipe"), [
    ("hopper", "w4a8_block"), ("blackwell", "w4a8"),
    *(pytest.param("hopper", more, marks=pytest.mark.every) for more in ("w8a8", "nvfp4")),
])  # fmt: skip
def test_all_that_layers_of_the_checks_launch_is_compiled_ahead(
    there, monkeypatch, backend, recipe
):
    pretend, machine = {
        "hopper": (pretending.pretend_h200, H200), "blackwell": (pretending.pretend_b200, B200),
    }[backend]  # fmt: skip
    pretend(monkeypatch)
    monkeypatch.setattr(ahead, "hardware_of", lambda device: machine)
    monkeypatch.setattr(checks, "held", lambda *found: "")
    monkeypatch.setattr(torch, "equal", lambda *both: True)
    sizes = replace(GPU, long_k=512, products=(1, 64), gemms=(2, 512), layers=(7, 64), num_soak=0)
    target, asked = Blind(backend, CPU, (recipe,), own_sizes=sizes), {}
    for check in all_checks(target):
        if check.stage in ("oracle", "formats", "hardware") or "grouped alone" in check.name:
            continue
        with recorded(target_of(machine)) as seen:
            try:
                check.run()
            except Failed:
                assert check.stage == "waits"  # nothing was launched
        asked |= {one.hash: f"{check.stage}, {check.name}: {one.kernel}" for one in seen.values()}
    found = {one.hash: one.kernel for one in cubins_of_all(ahead.works_of(target))}
    left = {name for key, name in asked.items() if key not in found}
    assert left <= {f"bits, {recipe}: _pool_kernel"}  # of one token, whose weights lie unaligned
    graphs = {"_read_args_kernel", "_copy_inputs_kernel", "_copy_output_kernel"}
    assert graphs <= {name for key, name in found.items() if key not in asked}


def test_compiling_ahead_is_shown_and_no_check_depends_on_it(monkeypatch, there):
    steps = []

    def compiled(works, *, processes, progress):
        progress(1, len(works))
        raise NotAvailable("no compiler")

    monkeypatch.setattr("megamoe.engine.precompile.compile_layers", compiled)
    monkeypatch.setattr(run, "_apart", lambda target, names: iter(()))
    monkeypatch.setattr(ahead, "hardware_of", lambda device: H200)
    report = run.certify(
        OnGpu("hopper", CPU, ("w4a8",), own_sizes=TINY), lambda *at: steps.append(at)
    )
    assert steps and {step[0] for step in steps} == {"compile"} and not report.ok
    ahead.compile_ahead(Target("reference", CUDA, ("w4a8",)), lambda done, of: 1 / 0)


@pytest.mark.parametrize("name", FORMATS)
def test_only_the_payload_of_nan_may_be_the_devices(monkeypatch, name):
    """Vectorised casts on a CPU make NaN 0xffff in BF16, others 0x7fc0, CUDA's 0x7fff."""
    real, target = checks.quantize, OnGpu("hopper", CPU)

    def other(change):
        calls = []

        def quantize(x, name):
            found = real(x, name)
            calls.append(x)
            if len(calls) == 2:
                change(found)
            return found

        monkeypatch.setattr(checks, "quantize", quantize)
        return checks._format(target, name)

    def as_cuda(found):
        if found.data.dtype == torch.bfloat16:
            raw = found.data.view(torch.int16)
            raw.masked_fill_(found.data.isnan(), 0x7FFF)

    def last_bit(found):
        found.data.view(torch.uint8)[2, 6] ^= 1

    def nan_lost(found):
        found.data[3, 5] = 0.0

    assert other(as_cuda) == "the CPU's bytes"
    for wrong in (last_bit, *([nan_lost] if name == "bf16" else [])):
        with pytest.raises(Failed, match="other bytes of data"):
            other(wrong)


def test_a_backend_is_asked_for_the_recipes_that_it_has(monkeypatch):
    monkeypatch.setattr(backends, "reasons_on", lambda device: {})
    assert run.on("hopper", "cuda").recipes == HOPPER_RECIPES
    assert set(run.on("blackwell", "cuda").recipes) == set(BLACKWELL_RECIPES)
    assert "nvfp4a16" in run.on("portable", "cuda").recipes
    with pytest.raises(NotAvailable, match=r"hopper certifies bf16, .*; got nvfp4a16"):
        run.with_recipes(run.on("hopper", "cuda"), ("nvfp4a16",))


def test_every_kind_of_call_is_taken_somewhere():
    """A stage in which each check says that the mode takes none of it would prove nothing."""
    target = Target("hopper", CUDA, HOPPER_RECIPES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "hardware_of", lambda device: H200)
        works = ahead.works_of(target)
    for recipe in HOPPER_RECIPES:
        fused = {
            layer.options: tokens
            for layer, tokens in works
            if layer.recipe == recipe and dict(layer.overrides)["mode"] == "fused"
            and layer.num_ranks == 1
        }  # fmt: skip
        assert len(fused) == len({str(options) for _, _, options in CASES.values()})
        assert all({1, 7, 64} <= set(tokens) for tokens in fused.values())
