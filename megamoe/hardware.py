"""Hardware: the machine as a value. `engine.planning.hardware_of` asks a real one.

Every figure carries its source in words. "Paper" is what the vendor prints; "reached" is what a
plain kernel was seen to reach, and floors are computed from it. Tensor peaks are dense.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megamoe.errors import NotAvailable, RangeError, require

SMEM_PER_CTA = 232448  # 227 KiB: what one CTA may use on sm_90 and sm_100 (CUDA guide)
REGISTERS_PER_SM = 65536


@dataclass(frozen=True, slots=True)
class Figure:
    """One number and where it comes from."""

    value: float
    source: str

    def __str__(self) -> str:
        return f"{self.value:g} ({self.source})"


@dataclass(frozen=True, slots=True)
class Rate:
    """A speed: what the vendor prints, and what was reached."""

    paper: Figure
    reached: Figure

    def times(self, factor: float) -> Rate:
        """The same of a part of the machine."""
        paper, reached = (
            Figure(f.value * factor, f"{f.source}; times {factor:.3g}")
            for f in (self.paper, self.reached)
        )
        return Rate(paper, reached)


@dataclass(frozen=True, slots=True, repr=False)
class Hardware:
    """One GPU and its links. Integers in bytes and SMs, speeds in GB/s and TFLOP/s."""

    name: str  # "h200": what `named` looks up
    label: str  # the name in prose
    arch: str  # "sm_90a", "sm_100a", "sm_103a": what kernels compile for
    num_sms: int  # streaming multiprocessors
    l2_bytes: int  # of the L2 cache
    hbm_bytes: int  # of its memory
    hbm_gbs: Rate  # of its memory, on paper and reached
    tensor_tflops: tuple[tuple[str, Rate], ...]  # per MMA type the machine has
    nvlink_gbs: Rate  # one direction, one GPU to all its peers together
    nvlink_domain: int  # GPUs that reach each other by plain loads and stores
    launch_us: Figure  # one graph launch, empty kernel
    counts_source: str  # of SMs, L2, HBM size and NVLink domain
    smem_per_sm: int = SMEM_PER_CTA  # usable by one CTA
    registers_per_sm: int = REGISTERS_PER_SM  # of 32 bits

    @staticmethod
    def named(name: str) -> Hardware:
        """The machine of that name, or an error that lists the names.

        name  in any case: "h200", "b200", ...

        >>> Hardware.named("H200").num_sms
        132
        """
        known = name.lower() if isinstance(name, str) else name
        require(
            known in MACHINES,
            "hardware must be one of " + ", ".join(MACHINES),
            got=repr(name),
            fix="build another one with dataclasses.replace(Hardware.named('h200'), num_sms=...)",
            kind=RangeError,
        )
        return MACHINES[known]

    def tensor(self, mma: str) -> Rate:
        """Peak of one MMA type, or an error that lists those the machine has.

        mma  "fp8", "bf16", ...
        """
        rates = dict(self.tensor_tflops)
        require(
            mma in rates,
            f"{self.label} multiplies {', '.join(rates)}",
            got=mma,
            fix="choose a recipe whose operands it has",
            kind=NotAvailable,
        )
        return rates[mma]

    def part(self, num: int, num_sms: int) -> Hardware:
        """What one of `num` users has that share the machine alike, each on SMs of its own.

        num      users: their parts of memory's and links' speed and of L2 are equal
        num_sms  SMs of each
        """
        by_sms = num_sms / self.num_sms
        return replace(
            self,
            num_sms=num_sms,
            l2_bytes=self.l2_bytes // num,
            hbm_bytes=self.hbm_bytes // num,
            hbm_gbs=self.hbm_gbs.times(1 / num),
            tensor_tflops=tuple((mma, rate.times(by_sms)) for mma, rate in self.tensor_tflops),
            nvlink_gbs=self.nvlink_gbs.times(1 / num),
        )

    @property
    def is_blackwell(self) -> bool:
        """Whether it is a B200, GB200 or B300: nothing was measured there by us."""
        return self.arch.startswith("sm_10")

    def figures(self) -> tuple[tuple[str, float, str, str], ...]:
        """Every number as (name, value, unit, source), for printing."""
        counts = (
            ("num_sms", self.num_sms, "SMs"),
            ("l2_bytes", self.l2_bytes, "B"),
            ("hbm_bytes", self.hbm_bytes, "B"),
            ("nvlink_domain", self.nvlink_domain, "GPUs"),
        )
        rows = [(name, float(value), unit, self.counts_source) for name, value, unit in counts]
        guide = "CUDA programming guide, compute capability table"
        rows.append(("smem_per_sm", float(self.smem_per_sm), "B", guide))
        rows.append(("registers_per_sm", float(self.registers_per_sm), "registers", guide))
        rates = [("hbm", "GB/s", self.hbm_gbs), ("nvlink", "GB/s", self.nvlink_gbs)]
        rates += [(f"tensor {mma}", "TFLOP/s", rate) for mma, rate in self.tensor_tflops]
        for name, unit, rate in rates:
            rows.append((f"{name}, paper", rate.paper.value, unit, rate.paper.source))
            rows.append((f"{name}, reached", rate.reached.value, unit, rate.reached.source))
        rows.append(("launch", self.launch_us.value, "us", self.launch_us.source))
        return tuple(rows)

    def __repr__(self) -> str:
        return f"Hardware({self.name}, {self.arch}, {self.num_sms} SMs)"

    def __str__(self) -> str:
        rows = [f"{self.label} ({self.name}, {self.arch})"]
        rows += [f"  {n:<22}{v:>16,.1f} {u:<10}{s}" for n, v, u, s in self.figures()]
        return "\n".join(rows)


# What one H200 reached (132 SMs, driver 580, CUDA 13.0, torch 2.11), CUDA-graph replays.
_OURS = "measured on one H200"
_REACHED = {
    "hbm": Figure(4597.0, f"{_OURS}: plain read of 4 GiB; up to 4,693 on others"),
    "bf16": Figure(784.5, f"{_OURS}: cuBLAS 8192^3"),
    "fp8": Figure(1492.9, f"{_OURS}: cuBLAS row-wise 8192^3; tensor-wise reaches 1405"),
}
_PAPER = {"hbm": 4800.0, "bf16": 989.5, "fp8": 1979.0}
_PAIR = "not measured here; slower direction of a public 2 x H100 run (402 of 450 GB/s)"
_LAUNCH = Figure(4.7, f"{_OURS}: empty CUDA graph")


def _unmeasured(paper: float, like: str) -> Figure:
    ratio = _REACHED[like].value / _PAPER[like]
    return Figure(round(paper * ratio, 1), f"not measured; paper x {ratio:.3f}, reached on H200")


def _rate(paper: float, like: str, source: str) -> Rate:
    return Rate(Figure(paper, source), _unmeasured(paper, like))


def _peaks(source: str, **paper: float) -> tuple[tuple[str, Rate], ...]:
    # FP4 has no H200 figure of its own: it takes FP8's ratio.
    like = {"bf16": "bf16", "fp8": "fp8", "fp4": "fp8"}
    return tuple((mma, _rate(value, like[mma], source)) for mma, value in paper.items())


def _nvlink(paper: float, reached: float, reached_source: str) -> Rate:
    source = "NVIDIA datasheet: half of the bidirectional figure"
    return Rate(Figure(paper, source), Figure(reached, reached_source))


def _borrowed(launch: Figure) -> Figure:
    return Figure(launch.value, "not measured; as on H200")


_SHEET = "NVIDIA datasheet, dense"
_PAIR_LINK = _nvlink(450.0, 402.0, _PAIR)
_NV5 = _nvlink(900.0, 726.0, "not measured here; DeepEP V2 README, EP8 dispatch on sm_100")

H200 = Hardware(
    name="h200",
    label="NVIDIA H200 SXM",
    arch="sm_90a",
    num_sms=132,
    l2_bytes=50 * 2**20,
    hbm_bytes=141 * 10**9,
    hbm_gbs=Rate(Figure(_PAPER["hbm"], _SHEET), _REACHED["hbm"]),
    tensor_tflops=tuple(
        (mma, Rate(Figure(_PAPER[mma], _SHEET), _REACHED[mma])) for mma in ("bf16", "fp8")
    ),
    nvlink_gbs=_PAIR_LINK,
    nvlink_domain=8,
    launch_us=_LAUNCH,
    counts_source="NVIDIA datasheet; SMs as CUDA reports them",
)

H100 = Hardware(
    name="h100",
    label="NVIDIA H100 SXM",
    arch="sm_90a",
    num_sms=132,
    l2_bytes=50 * 2**20,
    hbm_bytes=80 * 10**9,
    hbm_gbs=_rate(3350.0, "hbm", _SHEET),
    tensor_tflops=_peaks(_SHEET, bf16=989.5, fp8=1979.0),
    nvlink_gbs=_PAIR_LINK,
    nvlink_domain=8,
    launch_us=_borrowed(_LAUNCH),
    counts_source="NVIDIA datasheet",
)

H20 = Hardware(
    name="h20",
    label="NVIDIA H20",
    arch="sm_90a",
    num_sms=78,
    l2_bytes=60 * 2**20,
    hbm_bytes=96 * 10**9,
    hbm_gbs=_rate(4000.0, "hbm", "published specification"),
    tensor_tflops=_peaks("published specification", bf16=148.0, fp8=296.0),
    nvlink_gbs=_PAIR_LINK,
    nvlink_domain=8,
    launch_us=_borrowed(_LAUNCH),
    counts_source="published specification",
)

B200 = Hardware(
    name="b200",
    label="NVIDIA B200 (HGX)",
    arch="sm_100a",
    num_sms=148,
    l2_bytes=126 * 2**20,
    hbm_bytes=180 * 10**9,
    hbm_gbs=_rate(8000.0, "hbm", _SHEET),
    tensor_tflops=_peaks(_SHEET, bf16=2250.0, fp8=4500.0, fp4=9000.0),
    nvlink_gbs=_NV5,
    nvlink_domain=8,
    launch_us=_borrowed(_LAUNCH),
    counts_source="NVIDIA datasheet; SMs and L2 as CUDA reports them",
)

GB200 = Hardware(
    name="gb200",
    label="NVIDIA GB200 (one GPU of NVL72)",
    arch="sm_100a",
    num_sms=152,
    l2_bytes=126 * 2**20,
    hbm_bytes=186 * 10**9,
    hbm_gbs=_rate(8000.0, "hbm", _SHEET),
    tensor_tflops=_peaks(_SHEET, bf16=2500.0, fp8=5000.0, fp4=10000.0),
    nvlink_gbs=_NV5,
    nvlink_domain=72,
    launch_us=_borrowed(_LAUNCH),
    counts_source="NVIDIA datasheet; SMs and L2 as CUDA reports them",
)

B300 = Hardware(
    name="b300",
    label="NVIDIA B300 (HGX)",
    arch="sm_103a",
    num_sms=148,
    l2_bytes=126 * 2**20,
    hbm_bytes=270 * 10**9,
    hbm_gbs=_rate(8000.0, "hbm", _SHEET),
    tensor_tflops=_peaks(_SHEET, bf16=2250.0, fp8=4500.0, fp4=13500.0),
    nvlink_gbs=_NV5,
    nvlink_domain=8,
    launch_us=_borrowed(_LAUNCH),
    counts_source="NVIDIA datasheet; SMs as CUDA reports them (the block diagram draws 160)",
)

_NO = Figure(1.0, "not known")
CPU = Hardware(
    name="cpu",
    label="this CPU",
    arch="cpu",
    num_sms=1,
    l2_bytes=0,
    hbm_bytes=0,
    hbm_gbs=Rate(_NO, _NO),
    tensor_tflops=(("float64", Rate(_NO, _NO)), ("bf16", Rate(_NO, _NO)), ("fp8", Rate(_NO, _NO))),
    nvlink_gbs=Rate(_NO, _NO),
    nvlink_domain=1,
    launch_us=Figure(0.0, "no launches"),
    counts_source="the oracle runs anywhere",
)

MACHINES: dict[str, Hardware] = {hw.name: hw for hw in (H100, H200, H20, B200, GB200, B300)}


def match(device_name: str, num_sms: int) -> Hardware:
    """The row for a device as CUDA describes it, e.g. ("NVIDIA H200", 132).

    A card of the same name with another number of SMs (a PCIe board, a MIG slice) has other
    figures too, so it is refused rather than guessed.
    """
    words = device_name.lower().split()
    machines = [hw for hw in MACHINES.values() if hw.name in words and hw.num_sms == num_sms]
    known = ", ".join(f"{hw.name} ({hw.num_sms} SMs)" for hw in MACHINES.values())
    require(
        len(machines) == 1,
        f"the GPU must be one of {known}",
        got=f"{device_name!r} with {num_sms} SMs",
        fix="pass a Hardware built with dataclasses.replace",
        kind=NotAvailable,
    )
    return machines[0]


def of_gpu(device_name: str, num_sms: int, arch: str, hbm_bytes: int) -> Hardware:
    """The machine of a GPU, also of one that the table does not have: its speeds are not known."""
    try:
        return match(device_name, num_sms)
    except NotAvailable:
        borrowed = "not known; as on H200"
        return replace(
            H200,
            name=device_name.lower().replace(" ", "-"),
            label=device_name,
            arch=arch,
            num_sms=num_sms,
            hbm_bytes=hbm_bytes,
            hbm_gbs=Rate(
                *(Figure(f.value, borrowed) for f in (H200.hbm_gbs.paper, H200.hbm_gbs.reached))
            ),
            counts_source="as CUDA reports them; speeds are not known",
        )
