"""Study: the protocol of DeepGEMM's fused MegaMoE kernel, planned, explored and simulated.

No launch of this library runs it. It is a model of the reference system: its waves, ring,
workspace and barriers, with an explorer that interleaves its roles.
"""
