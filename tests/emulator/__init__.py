"""Gluon kernels on a CPU: every role of every CTA is a thread, every tensor one of torch.

`scheduler` runs the same kernels one step at a time instead (docs/proof.md). What threads
show: indices (each access is held to an allocation), barriers (counts, phases, bytes that
TMA brings), who waits for whom (a circle ends in an error that names it), and results. What it does
not: layouts, fences, the memory model, registers, time. Kernels are taken as they stand: their
Python functions run with `gl`, `mbarrier` and the like replaced by what is here.
"""

from megamoe.kernels.gluon import dispatch, exchange, permute, pull, tile_scheduler, window
from megamoe.kernels.hopper import launch
from megamoe.kernels.hopper.gemm import fp8_rows
from megamoe.kernels.hopper.mega import launch as mega_launch
from megamoe.kernels.portable import combine, sort
from megamoe.kernels.portable import dispatch as portable_dispatch
from tests.emulator import (
    language,  # noqa: F401  what kernels get
    running,
)
from tests.emulator.running import Emulated
from tests.pretending import pretend_h200

KERNELS = tuple(
    (module, name, getattr(module, name))
    for module, name in (
        (launch, "gemm_swap_ab_kernel"), (launch, "gemm_kernel"), (mega_launch, "mega_kernel"),
        (dispatch, "_pool_kernel"), (permute, "_count_kernel"), (permute, "_place_kernel"),
        (sort, "_scan_kernel"), (tile_scheduler, "_schedule_kernel"), (combine, "_combine_kernel"),
        (portable_dispatch, "_dispatch_kernel"), (exchange, "_quantize_kernel"),
        (exchange, "exchange_kernel"), (exchange, "finish_kernel"), (pull, "_rows_kernel"),
        (pull, "pull_kernel"), (window, "_window_kernel"), (fp8_rows, "scales_kernel"),
    )
)  # fmt: skip


def install(monkeypatch, num_sms=3):
    """Let the Hopper backend launch here, on a GPU of so few SMs; -> its kernels by name.

    The L2 cache is always warm (`l2_policy`): where a tile has a window, all weights keep to it.
    """
    found = {name: Emulated(kernel) for _, name, kernel in KERNELS}
    for module in running._MODULES.values():  # of the emulated kernels: compiled ones keep theirs
        if "L2_WARM_BYTES" in module:
            module["L2_WARM_BYTES"] = 0
        if "BOUND_NS" in module:  # of a GPU; threads on a busy machine take longer
            module["BOUND_NS"] = int(1e9 * running.WAIT_S)
    for module, name, _ in KERNELS:
        monkeypatch.setattr(module, name, found[name])
    pretend_h200(monkeypatch, num_sms)
    return found
