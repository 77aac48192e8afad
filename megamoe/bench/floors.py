"""What a call must at least compute and move, and how long that takes at measured ceilings.

Bytes of a call: the weights (and scales) of the experts that some token uses, in the checkpoint's
format, the BF16 tokens in and the BF16 tokens out. Rows between the two linears are left out: a
fused layer may keep them in L2, and a floor must be one that nothing beats (A083). Standard
library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from megamoe.bench.cells import Cell
from megamoe.errors import NotAvailable, require

WIDER = {"fp4": "fp8", "fp8": "bf16"}  # every value of a type is one of the next wider type


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What plain kernels reach on this machine in this run."""

    copy_gbs: float  # bytes read plus bytes written
    read_gbs: float
    tflops: dict[str, float]  # per MMA type that the machine has: large matrix product
    launch_us: float  # one small kernel
    about: str

    @property
    def hbm_gbs(self) -> float:
        """The better of copy and read."""
        return max(self.copy_gbs, self.read_gbs)

    def peak(self, mma: str) -> tuple[float, str]:
        """TFLOP/s of an MMA type and the type it was measured with: the next wider one there is."""
        while mma not in self.tflops:
            require(
                mma in WIDER,
                "a floor needs the measured peak of its MMA type or of a wider one",
                got=f"{mma}, with {', '.join(self.tflops) or 'none'} measured",
                kind=NotAvailable,
            )
            mma = WIDER[mma]
        return self.tflops[mma], mma


@dataclass(frozen=True, slots=True)
class Cost:
    """Flops and bytes of one call."""

    flops: int
    weight_bytes: int
    token_bytes: int
    mma: str

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.token_bytes

    def floor(self, ceilings: Ceilings) -> tuple[float, str]:
        """The roofline in microseconds, and what sets it: "hbm" or the MMA type."""
        tflops, mma = ceilings.peak(self.mma)
        tensor_us = self.flops / (tflops * 1e6)
        hbm_us = self.num_bytes / (ceilings.hbm_gbs * 1e3)
        return (tensor_us, mma) if tensor_us > hbm_us else (hbm_us, "hbm")


def layer_cost(cell: Cell, touched: int, expert_bytes: int, mma: str) -> Cost:
    """One call of a cell whose tokens use `touched` routed experts of `expert_bytes` each."""
    s = cell.shape
    return Cost(
        flops=6 * cell.num_rows * s.hidden * s.intermediate,
        weight_bytes=(touched + s.num_shared) * expert_bytes,
        token_bytes=2 * 2 * cell.num_tokens * s.hidden,
        mma=mma,
    )
