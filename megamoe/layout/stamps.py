"""Stamps: what the roles of a fused launch write of themselves, and how it lies in memory.

int32 [CTAs, ROLES, EVENTS, 4]: each event is (kind, ticket, begin, end) with the low 32 bits of the
GPU's nanoseconds; a kind of 0 is no event. The kernel writes these numbers, `trace` reads them.
"""

ROLES = 4
MATH, LOAD_WEIGHTS, LOAD_TOKENS, PUBLISH = range(ROLES)
ROUTE, FILL, L1, L2, END, COMBINE, WAIT = range(1, 8)  # kinds; END: the wait for all CTAs
EVENTS = 128  # that a role keeps; those after them overwrite the last
POOL = -1  # the ticket of a wait for all tokens
