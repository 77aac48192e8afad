"""No function takes more than a dozen parameters, and no call gives more than eight by position."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "megamoe"
TREES = {str(p.relative_to(ROOT)): ast.parse(p.read_text()) for p in ROOT.rglob("*.py")}
MOST = 12
MOST_BY_POSITION = 8

PUBLIC, PEERS, OPTIONS = (
    "a public constructor or call",
    "a peer's own interface",
    "a command's options",
)
# (file, function): why it may have more. Kernel entries (`*_kernel`) may.
EXCUSED = {
    ("engine/functional.py", "moe"): PUBLIC,
    ("engine/layer.py", "__init__"): PUBLIC,
    ("engine/local.py", "__init__"): PUBLIC,
    ("engine/weights.py", "from_quantized"): PUBLIC,
    ("compat/deep_gemm/buffer.py", "__init__"): PEERS,
    ("compat/deep_gemm/dispatch.py", "mega_moe_pre_dispatch"): PEERS,
    ("compat/deep_gemm/mega.py", "fp8_fp4_mega_moe"): PEERS,
    ("compat/deep_gemm/mega.py", "nvfp4_mega_moe"): PEERS,
    ("compat/deep_gemm/mega.py", "bf16_mega_moe"): PEERS,
    ("cli/bench.py", "layer"): OPTIONS,
    ("cli/bench_more.py", "fixed"): OPTIONS,
    ("cli/compile.py", "command"): OPTIONS,
    ("cli/overlap.py", "overlap"): OPTIONS,
    ("cli/plan.py", "command"): OPTIONS,
    ("cli/simulate.py", "command"): OPTIONS,
    # A kernel's own body, which one of two loops runs.
    ("kernels/portable/gemm.py", "_linear_tile"): "the entry's own arguments",
}  # fmt: skip


def is_jit(function):
    return any("jit" in ast.unparse(one) for one in function.decorator_list)


def functions():
    """(file, function) of the package."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def num_parameters(function):
    a = function.args
    return len(a.posonlyargs + a.args + a.kwonlyargs) + (a.vararg is not None) + bool(a.kwarg)


def test_no_function_takes_more_than_a_dozen_parameters():
    many = {
        (path, one.name)
        for path, one in functions()
        if num_parameters(one) > MOST and not (is_jit(one) and one.name.endswith("_kernel"))
    }
    assert many == set(EXCUSED)  # nor is an excuse needless


def test_kernels_are_launched_by_keyword():
    entries = {one.name for _, one in functions() if is_jit(one)}
    launched = [
        (path, node.lineno, name, node.args)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
        if (name := ast.unparse(node.func.value).split(".")[-1]) in entries
    ]
    by_position = {(path, name) for path, _, name, args in launched if args}
    assert len(launched) > 15 and not by_position


# (file, callee): calls outside of kernels with more arguments by position. It may only shrink.
BY_POSITION = {
    ("cli/bench_more.py", "Table"), ("cli/bench_more.py", "table.add_row"),
    ("compat/deep_gemm/buffer.py", "SymmBuffer"),
    ("engine/layer.py", "Parts"),
    ("engine/loader.py", "Picked"),
    ("engine/weights.py", "checkpoint.extras"),
    ("studies/deep_gemm/plan.py", "Plan"),
}  # fmt: skip


def test_calls_give_few_arguments_by_position():
    many = {
        (path, ast.unparse(node.func))
        for path, tree in TREES.items()
        if not path.startswith("kernels/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and len(node.args) > MOST_BY_POSITION
    }
    assert many <= BY_POSITION, "pass them by keyword"
    assert not BY_POSITION - many, "these are by keyword now: take them out of the list"


def test_no_function_hides_parameters_in_a_tuple():
    """`*args` that a function unpacks at once are parameters without names."""
    hidden = {
        (path, one.name)
        for path, one in functions()
        if one.args.vararg is not None
        for node in ast.walk(one)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
        if isinstance(node.value, ast.Name) and node.value.id == one.args.vararg.arg
    }
    # Torch calls the one; the other's are the sizes of a layer, in their order.
    assert hidden <= {("engine/expert_module.py", "_load_packed"), ("certify/ahead.py", "_layer")}
