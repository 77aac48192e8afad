"""Who reports a counter of the fused launch that somebody left wrong: emulated, and on a GPU."""

from megamoe.kernels.gluon.mega import sync

# EXIT's goes unnoticed: nobody clears, and the next call's counts are wrong.
WAITS = {
    "POOL": {sync.WAIT_POOL.value},
    "TICKET": {sync.WAIT_TICKETS.value},
    "L1_DONE": {sync.WAIT_L1.value, sync.WAIT_DONE.value},
    "DONE": {sync.WAIT_DONE.value},
    "EXIT": {0},
}
