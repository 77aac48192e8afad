"""The record of random calls on a GPU claims no more than ran."""

from collections import Counter

from scripts import fuzz


def test_a_record_says_that_all_ran_only_when_so_many_did():
    ran = {0: Counter(auto=5_000, fused=200), 1: Counter(auto=5_100)}
    assert "10,300 random calls of 2 seeds, all" in fuzz.record("H200", ran, {}, 10_000)
    assert "NOT COMPLETE: 10,300 of 50,000" in fuzz.record("H200", ran, {}, 50_000)
    text = fuzz.record("H200", ran, {1: "AssertionError: bits"}, 5_000)
    assert "NOT COMPLETE: 5,200 of 5,000" in text and "seed 1: FAILED" in text
    assert "auto 5,000, fused 200" in text
