"""Hints for L2 find their copies in what the compiler writes."""

import pytest

from megamoe.kernels.gluon import l2_policy

COPY = "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
AT = "[%r1], [%rd2, {%r3, %r4, %r5, %r6}], [%r7]"
PLAIN, HINTED = f"\t@%p5 {COPY} {AT};", f"\t@%p5 {COPY}.L2::cache_hint {AT}, %rd85;"
MARK, UNMARK = (
    "\t" + text.value.replace("$0", "%r9").replace("$1", "%rd85")
    for text in (l2_policy.MARK, l2_policy.UNMARK)
)
OTHER = MARK.replace("85", "86")


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([MARK, "\telect.sync %r8, 0;", PLAIN, UNMARK, PLAIN], [2]),
        ([MARK, PLAIN, "\tadd.s32 %r1, %r1, 8;", PLAIN, UNMARK], [1, 3]),  # a wide copy
        ([MARK, "$L__tmp7:", PLAIN, UNMARK], [2]),  # for a debugger; the block goes on
        ([MARK, "$L__BB0_7:", PLAIN, UNMARK], []),  # registers may mean something else there
        ([PLAIN, UNMARK, PLAIN], []),
    ],
    ids=["one", "two", "debug", "block", "none"],
)
def test_copies_between_marks_get_the_policy(given, wanted):
    found = l2_policy.hinted("\n".join(given)).split("\n")
    assert found == [HINTED if i in wanted else line for i, line in enumerate(given)]


def test_the_last_mark_counts():
    found = l2_policy.hinted("\n".join([MARK, PLAIN, UNMARK, OTHER, PLAIN, UNMARK])).split("\n")
    assert found[1] == HINTED and found[4] == HINTED.replace("85", "86")
