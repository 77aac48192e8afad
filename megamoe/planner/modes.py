"""The mode of a call: staged, fused, chain or split, each with its reason, or a named refusal."""

from __future__ import annotations

from collections.abc import Mapping

from megamoe.planner import blackwell_fused, chain, fused, hopper
from megamoe.planner.call import CallSpec
from megamoe.planner.choice import Value
from megamoe.planner.tables import blackwell as tmem_tables
from megamoe.planner.tables import hopper as tables

WITHOUT_HOST = ("fused", "chain", "split")  # over ranks: nothing happens on the host between them
NOT_RUN = "emulated and compiled, not yet run on the hardware"


def mode_of(
    call: CallSpec, backend: str, overrides: Mapping[str, Value], asked: str
) -> tuple[str, str]:
    """(mode, why); refuses a mode that was asked for with the reason where nothing takes the call.

    asked  "auto", or a mode that the backend has
    """
    if backend == "reference":
        mode = "staged" if asked == "auto" else asked
        if mode == "chain":
            fused.require_mode(mode, chain.why_not_alone(call))
        return mode, "computed by the oracle: the same result, no launches"
    if backend == "portable":
        return "staged", "portable has no fused launch"
    if asked == "staged":
        return "staged", "asked for"
    return (_tmem if backend == "blackwell" else _hopper)(call, overrides, asked)


def _hopper(call: CallSpec, overrides: Mapping[str, Value], asked: str) -> tuple[str, str]:
    if asked in ("split", "chain"):
        fused.require_mode(asked, why_not_split(call) if asked == "split" else chain.why_not(call))
        return asked, "asked for"
    refusal = hopper.why_not_fused(call, overrides)
    if asked == "fused":
        fused.require_mode("fused", refusal)
        return "fused", "asked for"
    if call.is_group:
        return auto_over_group(call, refusal)
    if refusal is not None:
        return "staged", refusal.why
    slots = call.problem.num_tokens * call.problem.top_k * call.problem.num_ranks
    return next((mode, why) for edge, mode, why, *_ in tables.MODES if slots <= edge)


def _tmem(call: CallSpec, overrides: Mapping[str, Value], asked: str) -> tuple[str, str]:
    """On Blackwell: a chain where it is asked for, or where the machine has proven it."""
    if asked == "chain":
        fused.require_mode("chain", chain.why_not(call))
        return "chain", f"asked for; {NOT_RUN}"
    if asked == "fused":
        fused.require_mode("fused", blackwell_fused.why_not_fused(call, overrides))
        return "fused", f"asked for; {NOT_RUN}"
    if call.is_group:
        refusal = chain.why_not(call)
        if refusal is not None:
            return "staged", refusal.why
        if not call.is_certified:
            why = "the machine has no certificate, and it was emulated and compiled, not yet run"
            return "staged", f"mode='chain' takes it, but is opt-in: {why}"
        why = "no host between ranks; emulated, compiled, and in the machine's certificate"
        return "chain", why
    refusal = blackwell_fused.why_not_fused(call, overrides)
    if refusal is not None:
        return "staged", refusal.why
    slots = call.problem.num_tokens * call.problem.top_k * call.problem.num_ranks
    return next((mode, why) for edge, mode, why in tmem_tables.MODES if slots <= edge)


def why_not_split(call: CallSpec) -> fused.Refusal | None:
    """Why no call like this is split; None where one is."""
    if call.problem.num_ranks == 1:
        return None
    if call.local_ranks > 1:
        return fused.Refusal("ranks that share a GPU have no parts of its SMs to themselves")
    return chain.why_not(call)


def auto_over_group(call: CallSpec, not_fused: fused.Refusal | None) -> tuple[str, str]:
    """Over a group: one fused launch, else the chain (`tables.AUTO_TAKES_CHAIN`), else staged."""
    refusal = chain.why_not(call)
    num, _ = hopper.passes_of(call)
    if not_fused is None and num == 1:
        return "fused", "one launch, and no host between ranks"
    why = not_fused.why if not_fused else (
        f"a call would take {num} fused launches, each of which reads all weights"
    )  # fmt: skip
    if refusal is not None:
        return "staged", f"{why}; {refusal.why}"
    if not tables.AUTO_TAKES_CHAIN:
        return "staged", f"{why}; mode='chain' takes it, but is opt-in: {tables.WHY_OPT_IN}"
    how = "no host between ranks, and transfers overlap the GEMMs"
    return "chain", f"{how}; {tables.WHY_CHAIN}; {why}"
