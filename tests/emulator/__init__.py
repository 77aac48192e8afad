"""Gluon kernels on a CPU: every role of every CTA is a thread, every tensor one of torch.

`scheduler` runs the same kernels one step at a time instead (docs/proof.md). What threads
show: indices (each access is held to an allocation), barriers (counts, phases, bytes that
TMA brings), who waits for whom (a circle ends in an error that names it), and results. What it does
not: layouts, fences, the memory model, registers, time. Kernels are taken as they stand: their
Python functions run with `gl`, `mbarrier` and the like replaced by what is here.
"""

from triton.experimental.gluon import language as gl

from megamoe.kernels.hopper import deal, launch, mega_launch, place, route, swapped
from megamoe.kernels.portable import combine, dispatch, sort
from tests.emulator import language  # noqa: F401  what kernels get
from tests.emulator.running import Emulated

KERNELS = tuple(
    (module, name, getattr(module, name))
    for module, name in (
        (launch, "swapped_kernel"), (launch, "straight_kernel"), (mega_launch, "mega_kernel"),
        (route, "_pool_kernel"), (place, "_count_kernel"), (place, "_place_kernel"),
        (sort, "_scan_kernel"), (deal, "_deal_kernel"), (combine, "_combine_kernel"),
        (dispatch, "_dispatch_kernel"),
    )
)  # fmt: skip


def install(monkeypatch, num_sms=3):
    """Let the Hopper backend launch here, on a GPU of so few SMs; -> its kernels by name.

    No launch is young (`stream.EARLY`): where a tile has a window, all its weights are held to it.
    """
    monkeypatch.setattr(swapped, "EARLY", gl.constexpr(0))
    found = {name: Emulated(kernel) for _, name, kernel in KERNELS}
    for module, name, _ in KERNELS:
        monkeypatch.setattr(module, name, found[name])
    for module in (launch, mega_launch):
        monkeypatch.setattr(module, "num_sms", lambda device: num_sms)
    return found
