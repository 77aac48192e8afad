"""`megamoe compile` and `megamoe plan --cubins`: what is counted, and what is refused."""

import json

import pytest

from tests.kernels.support import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


def test_a_dry_run_counts_kernels_and_compiles_none(megamoe):
    code, text, _ = megamoe("compile", "tiny", "--tokens", "1-4,64", "--dry-run", "--json")
    assert code == 0 and json.loads(text)["mega_kernel"] >= 2
    code, text, _ = megamoe(
        "compile", "tiny", "--tokens", "8", "--dry-run", "--ranks", "2", "--mode", "fused"
    )
    assert code == 0 and "cubins for 1 size" in text and "mega_kernel" in text
    chain = ("compile", "deepseek-v4-flash", "--tokens", "8", "--ranks", "8", "--mode", "chain")
    code, text, _ = megamoe(*chain, "--dry-run", "--json")
    kernels = set(json.loads(text))
    assert code == 0 and any("pull" in one for one in kernels) and "_read_args" in str(kernels)
    code, text, _ = megamoe(*chain, "--no-graphs", "--dry-run", "--json")
    assert "_read_args" not in text
    code, text, _ = megamoe("compile", "tiny", "--tokens", "8", "--dry-run", "--mode", "split")
    assert code == 0 and "_window_kernel" in text


def test_a_plan_counts_them_too(megamoe):
    code, text, _ = megamoe("plan", "tiny", "--ranks", "1", "--cubins", "1,8")
    assert code == 0 and "cubins for 2 sizes" in text


@pytest.mark.parametrize(("args", "why"), [
    (("--tokens", "x"), "numbers or ranges"),
    (("--tokens", "0"), "1 to 16384"),
    (("--ranks", "3"), "use 1, 2, 4 or 8 ranks"),
    (("--gpu", "p100"), "hardware must be one of"),
    (("--mode", "fast"), "mode must be one of"),
    (("--mode", "chain"), "give --ranks 2 to 8"),
])  # fmt: skip
def test_bad_input_ends_with_2(megamoe, args, why):
    code, _, text = megamoe("compile", "tiny", *args, "--dry-run")
    assert code == 2 and why in text
