"""Layers of the Blackwell backend on a CPU: the GEMM under a scheduler, other kernels freely."""

import threading

import pytest
import torch

from megamoe.engine import backends
from megamoe.engine.blackwell import BLACKWELL
from megamoe.engine.call import Call
from megamoe.engine.planning import plan_for, traits_of
from megamoe.engine.status import DeviceStatus
from megamoe.kernels.blackwell import grouped, launch
from megamoe.kernels.blackwell.gemm import gemm_tmem_kernel
from megamoe.kernels.blackwell.mega import launch as mega_launch
from megamoe.kernels.blackwell.mega.kernel import mega_tmem_kernel
from megamoe.kernels.gluon import dispatch, permute
from megamoe.kernels.portable import combine, sort
from megamoe.kernels.portable import dispatch as portable_dispatch
from megamoe.planner.overrides import checked
from megamoe.problem import Options
from tests import emulator
from tests.emulator import device, policies, tensor_memory
from tests.emulator.running import Emulated
from tests.emulator.scheduler import Scheduler
from tests.pretending import pretend_b200

CPU = torch.device("cpu")
PLAIN = (
    (dispatch, "_pool_kernel"), (permute, "_count_kernel"), (permute, "_place_kernel"),
    (sort, "_scan_kernel"), (combine, "_combine_kernel"), (portable_dispatch, "_dispatch_kernel"),
)  # fmt: skip


class Step:
    """A kernel whose every launch is a run of the scheduler under the seed's policy."""

    def __init__(self, kernel):
        tensor_memory.install()
        self.kernel = device.Scheduled(kernel)
        self.seed, self.launches = None, []  # no seed: nobody is preempted
        self.is_strict = True

    def __getitem__(self, grid):
        def run(**given):
            def host():
                self.kernel[grid](**{**given, "launch_pdl": False})
                device.synchronize()

            policy = policies.policy_of(self.seed) if self.seed is not None else policies.Calm()
            scheduler = Scheduler(policy, agents=600)
            scheduler.memory.is_strict = self.is_strict
            scheduler.run(host)
            self.launches.append((grid, given))

        return run


_MADE = {}


def gemm():
    """The GEMM under a scheduler, translated once."""
    if "gemm" not in _MADE:
        _MADE["gemm"] = Step(gemm_tmem_kernel)
    return _MADE["gemm"]


def install(monkeypatch, num_sms=3):
    """Let the Blackwell backend launch here; -> its GEMM, whose `seed` is that of the policy."""
    made = gemm()
    made.seed, made.launches = None, []
    monkeypatch.setattr(launch, "gemm_tmem_kernel", made)
    for module, name in PLAIN:
        monkeypatch.setattr(module, name, Emulated(getattr(module, name)))
    pretend_b200(monkeypatch, num_sms)
    return made


class Shared(Step):
    """The GEMM of ranks that are threads: one at a time, for it waits for no other rank's.

    hold  tensors that it reaches by address alone
    """

    lock = threading.RLock()

    def __getitem__(self, grid):
        run = super().__getitem__(grid)

        def locked(**given):
            with self.lock:
                self.kernel.hold = self.hold
                run(**given)

        return locked


def install_chain(monkeypatch, num_sms=4):
    """Let chains of the Blackwell backend launch here; -> their kernels by name."""
    if "chain" not in _MADE:
        _MADE["chain"] = Shared(gemm_tmem_kernel)
    made = _MADE["chain"]
    made.seed, made.launches, made.hold = None, [], []
    found = emulator.install(monkeypatch, num_sms)
    monkeypatch.setattr(launch, "gemm_tmem_kernel", made)
    pretend_b200(monkeypatch, num_sms)
    return found | {"gemm_tmem_kernel": made}


def install_grouped(monkeypatch, num_sms=3):
    """The same for grouped GEMMs alone, which take the device for one that they run on."""
    made = install(monkeypatch, num_sms)
    place = Emulated(grouped._place_groups_kernel)
    monkeypatch.setattr(grouped, "_place_groups_kernel", place)
    monkeypatch.setattr(backends, "resolve", lambda *_: None)
    return made


def layer(inputs, w, options=None, shared=None, stats=None, **given):
    """One call."""
    x, idx, _ = inputs
    options = options or Options()
    plan = plan_for(
        w, options, traits_of("blackwell", w, shared), num_tokens=len(x), top_k=idx.shape[1],
        overrides=checked({"backend": "blackwell", **given}),
        is_quantized=not isinstance(x, torch.Tensor),
    )  # fmt: skip
    status = DeviceStatus(CPU)
    y = BLACKWELL.run(Call(*inputs, w, options, shared, status, stats, None), plan)
    status.check(idx.shape[1])
    return y


# -- fused -----------------------------------------------------------------------------------------


def install_fused(monkeypatch, num_sms=3):
    """Let the Blackwell backend launch fused here; -> the kernel, whose `seed` is the policy's."""
    if "mega" not in _MADE:
        _MADE["mega"] = Step(mega_tmem_kernel)
    made = _MADE["mega"]
    made.seed, made.launches, made.kernel.hold, made.is_strict = None, [], [], True
    monkeypatch.setattr(mega_launch, "mega_tmem_kernel", made)
    pretend_b200(monkeypatch, num_sms)
    return made


def fused_layer(
    inputs, w, options=None, stats=None, status=None, count=None, is_poisoned=False, **given
):
    """One fused call, checked for faults unless it is poisoned."""
    x, idx, _ = inputs
    options = options or Options()
    plan = plan_for(
        w, options, traits_of("blackwell", w, None), num_tokens=len(x), top_k=idx.shape[1],
        overrides=checked({"backend": "blackwell", "mode": "fused", **given}),
    )  # fmt: skip
    status = status or DeviceStatus(CPU)
    call = Call(*inputs, w, options, None, status, stats, count, 30.0, is_poisoned)
    y = BLACKWELL.run(call, plan)
    if not is_poisoned:
        status.check(idx.shape[1])
    return y


def run_hosts(seed, *hosts):
    """Functions that launch fused kernels at the same time, GPU i for host i, under one policy."""
    policy = policies.policy_of(seed) if seed is not None else policies.Calm()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mega_launch, "mega_tmem_kernel", _MADE["mega"].kernel)
        Scheduler(policy, agents=900).run(*hosts)
