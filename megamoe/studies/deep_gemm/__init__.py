"""Study: DeepGEMM's fused MegaMoE kernel as a model, planned, explored and simulated.

No launch of this library runs what stands here, and no module of the library imports it: it is
reached by `megamoe plan --study deep_gemm`, `megamoe simulate --study deep_gemm`, its tests, and
`python -m megamoe.studies.deep_gemm.explore`. What it is for: a schedule to compare with, and a
protocol whose every interleaving can be tried. docs/studies/deep-gemm.md explains it.

plan, steps, overrides, heuristics/   what that kernel chooses, each choice with its reason
schedule                              the plan as the simulator plays it
blocks, waves, deal, walk, peeling    the order of blocks, and of rows within an expert
capacity, workspace                   its memory
protocol/                             roles, words and barriers as generators over a weak memory
explore/                              interleavings of them, ten policies, planted bugs
local_world                           real rows through the protocol, on the CPU (uses torch)
"""
