"""Why a call is as fast as it is: the plan with its reasons, and a simulated call. No GPU."""

import megamoe as mm

problem = mm.Problem(
    num_tokens=512, hidden=4096, intermediate=2048, num_experts=256, top_k=6, num_ranks=8,
    recipe="w4a8_block",
)  # fmt: skip
for machine in ("h200", "b200"):
    plan = mm.plan(problem, machine)
    print(f"{machine}: {plan.backend}, {plan.mode}, {plan.tile}: {plan.why}")
    print("  launches:", ", ".join(launch.name for launch in plan.launches))
    found = mm.simulate(plan, skew="zipf")
    share = found.exposed_us / found.time_us
    print(
        f"  predicted {found.time_us:.0f} us, floor {found.floor.time_us:.0f} us, "
        f"{share:.1%} of it waits for other ranks"
    )
