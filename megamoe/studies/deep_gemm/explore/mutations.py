"""Mutations: bugs that can be planted in the protocol, one switch each. Exploring must find all."""

from __future__ import annotations

# name: (what is wrong, a case that shows it)
MUTATIONS: dict[str, tuple[str, str]] = {
    "masked_slot_counted": ("a slot of -1 is sent to the last expert", "two ranks"),
    "duplicate_counted_once": ("the second slot of an expert is not counted", "same expert twice"),
    "ticket_off_by_one": ("an SM starts one place behind its ticket", "two ranks"),
    "counts_before_sources": ("counts are published before the source indices", "two ranks"),
    "no_grid_sync_before_publish": ("SM 0 publishes before all SMs reported", "two ranks"),
    "grid_sync_without_release": ("arriving at a grid sync releases nothing", "two ranks"),
    "barrier_phase_reused": ("all rank barriers use one signal word", "five calls"),
    "barrier_sign_kept": ("a signal word is never counted down again", "two ranks"),
    "counts_of_one_rank": ("blocks start when one rank has been counted in", "two ranks"),
    "peel_all_ranks": ("ranks that ran out still take their turn", "two ranks"),
    "ring_reused_early": ("a row is pulled into a slot that is still read", "quarter of a ring"),
    "ring_freed_one_early": ("a slot is free one L2 block too soon", "quarter of a ring"),
    "metadata_after_arrival": ("a row counts as arrived before it says whence", "two ranks"),
    "arrival_without_release": ("a row's arrival does not publish the row", "two ranks"),
    "no_l1_wait": ("L1 does not wait for its rows", "two ranks"),
    "arrival_of_whole_block": ("a short block waits for block_m rows", "two ranks"),
    "stage_not_awaited": ("a loader fills a stage that is still read", "two ranks"),
    "mask_wrong_bit": ("L1 sets the bit of its neighbour", "two ranks"),
    "mask_one_bit_short": ("L2 waits for all L1 blocks but one", "two ranks"),
    "mask_single_shift": ("the mask of 64 blocks by one shift is empty", "64 blocks in a mask"),
    "mask_before_store": ("the bit is set before the activations are stored", "two ranks"),
    "mask_without_release": ("the bit does not publish the activations", "two ranks"),
    "mask_without_acquire": ("the wait for the mask does not acquire", "two ranks"),
    "loaders_not_awaited": (
        "barrier 2 passes a loader that has read no counts",
        "no tokens at all",
    ),
    "pull_not_awaited": ("barrier 2 passes a pull_tokens that has read no counts", "two ranks"),
    "wrong_combine_slot": ("all rows of a token go to its first slot", "two ranks"),
    "combine_before_barrier_2": ("combine does not wait for the other ranks", "two ranks"),
    "clean_before_barrier_2": ("cleaning starts while blocks still run", "two ranks"),
    "clean_skips_done_count": ("one region is not cleaned", "two ranks"),
    "no_grid_sync_after_clean": ("SM 0 signals before the others have cleaned", "two ranks"),
    "no_barrier_3": ("the next call starts before peers have cleaned", "two ranks"),
    "stats_overwritten": ("statistics are stored instead of added", "two ranks"),
    "abort_not_polled": ("one wait does not look at the abort flag", "planted timeout"),
}
