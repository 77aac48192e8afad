"""Bugs planted in kernels by a tool that reads their source: synchronisation dropped or changed.

Sites are found by what they are, not by name: calls of mbarrier, fences, waits for groups and
products, semantics and scopes of atomics, counts, phases, words that ranks and launches wait for or
look at, whose report is written, and PTX that waits, signals or fences. A mutant is the changed
code of one function, put in place of that of the scheduled kernels (`device`).
"""

import ast
import contextlib
import copy
import functools
import inspect
import re
from dataclasses import dataclass
from types import CodeType

from tests.emulator import device

WEAKER = {"acq_rel": "relaxed", "release": "relaxed", "acquire": "relaxed", "sys": "gpu",
          "gpu": "cta", "ge": "eq"}  # fmt: skip
TEXTS = (
    ("acquires nothing", r"ld\.acquire\.", "ld.relaxed."),
    ("acquires at a narrower scope", r"ld\.acquire\.sys", "ld.acquire.gpu"),
    ("acquires at a narrower scope", r"ld\.acquire\.gpu", "ld.acquire.cta"),
    ("releases nothing", r"fence\.acq_rel\.\w+;", ""),
    ("releases at a narrower scope", r"fence\.acq_rel\.sys", "fence.acq_rel.gpu"),
    ("releases at a narrower scope", r"fence\.acq_rel\.gpu", "fence.acq_rel.cta"),
    ("has no proxy fence", r"fence\.proxy\.async\.global;", ""),
    ("releases nothing", r"st\.release\.", "st.relaxed."),
    ("releases at a narrower scope", r"st\.release\.sys", "st.release.gpu"),
    ("stores at a narrower scope", r"st\.relaxed\.sys", "st.relaxed.gpu"),
)


@dataclass(frozen=True)
class Mutant:
    """One planted bug: `code` instead of that of a function, or a text instead of what it gives.

    text  (arguments, PTX) of a function that gives PTX; (None, PTX) of a constant that is
    """

    module: str
    function: str
    what: str
    code: CodeType | None = None
    text: tuple[tuple[str, ...] | None, str] | None = None

    @property
    def name(self):
        return f"{self.module}.{self.function}: {self.what}"


def short_name(module):
    """The last two parts of a module's name; of Blackwell's, all from there on."""
    parts = module.split(".")
    at = parts.index("blackwell") if "blackwell" in parts else -2
    return ".".join(parts[at:])


# -- functions -------------------------------------------------------------------------------------


@functools.cache
def functions(module_name):
    """{name: (translated function, its source's tree)} of a module's jit functions."""
    found = {}
    for fn, made in device.FUNCTIONS.items():
        if fn.__module__ == module_name:
            lines, first = inspect.getsourcelines(fn)
            indent = len(lines[0]) - len(lines[0].lstrip())
            tree = ast.parse("".join(line[indent:] for line in lines)).body[0]
            ast.increment_lineno(tree, first - 1)
            tree.decorator_list = []
            found[fn.__name__] = made, tree
    return found


def compiled(made, tree):
    """The code of a changed function."""
    tree = ast.fix_missing_locations(as_compiled(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
    made_of = compile(ast.Module([tree], []), made.__code__.co_filename, "exec")
    return next(c for c in made_of.co_consts if isinstance(c, CodeType))


# -- sites -----------------------------------------------------------------------------------------


def _called(node):
    """The name of what a call calls: "mbarrier.wait", "fence_async_shared"."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _text(node):
    return re.sub(r"\s+", " ", ast.unparse(node))


@functools.cache
def _hand_shakes():
    """Names of jit functions that wait, arrive, fence or count, and give nothing back."""
    known = set()
    for made in device.FUNCTIONS.values():
        tree = functions(made.__globals__["__name__"])[made.__name__][1]
        if not any(isinstance(n, ast.Return) and n.value is not None for n in ast.walk(tree)):
            text = ast.unparse(tree)
            if (
                len(tree.body) <= 8
                and re.search(HAND_SHAKE, text)
                and "warp_specialize" not in text
                and "while" not in text
            ):
                known.add(made.__name__)
    return known


def _is_hand_shake(node):
    name = _called(node)
    if name.endswith(".store"):  # of a word that others wait for
        return re.search(COUNTED, ast.unparse(node.args[0])) is not None
    if name == "gl.inline_asm_elementwise":
        return ast.unparse(node.args[0]) in REPORTS
    return name in DROPPED or name in _hand_shakes() or re.match(r"[gt]l\.atomic_", name)


HAND_SHAKE = (
    r"mbarrier\.(wait|arrive)|griddepcontrol|fence\.proxy|tcgen05\.fence|atomic_"
    r"|_wait\(|wait_until_reached\(|wait_for\(|gdc_wait|_tell\(|\bSIGNAL\b|\bSTORE_IF_MISSED\b"
)
DROPPED = (
    "mbarrier.wait", "mbarrier.arrive", "mbarrier.expect", "fence_async_shared",
    "gl.thread_barrier", "async_copy.wait_group", "async_copy.commit_group", "tcgen05_commit",
    "gdc_wait", "gdc_launch_dependents", "_await_peer",
)  # fmt: skip
COUNTED = r"\b(arrived|l1_done|state|num_tiles|counter)\b|ITEM_(STORED|READ)|TILE_L1_DONE"
REPORTS = ("REPORT", "GIVE_UP")  # PTX that says who waited in vain
# Waits and signals on words of global memory: the places of the word and of the value in a call.
WORDS = {"bounded_wait": (0, 1), "_await_peer": (1, 2), "_signal": (0, 1), "_tell": (0, 2)}
WAITS = ("bounded_wait", "_await_peer")


def _blocks(tree):
    for node in ast.walk(tree):
        for name in ("body", "orelse"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def _changes(tree):
    """(what, change) of every site: `change` makes the bug in the tree it is given a copy of.

    A change finds its node by its place in `ast.walk`, which is the same in the copy.
    """
    nodes = list(ast.walk(tree))
    place = {id(node): i for i, node in enumerate(nodes)}

    def at(node, act):
        number = place[id(node)]

        def change(other):
            act(list(ast.walk(other))[number])

        return change

    for node in nodes:
        if isinstance(node, ast.Assign) and _called(node.value) in WAITS:

            def not_waited(statement):
                want = WORDS[_called(statement.value)][1]
                statement.value = statement.value.args[want]

            yield f"no {_text(node.value)}", at(node, not_waited)
    for block in _blocks(tree):
        owner = next(n for n in nodes if block in (getattr(n, "body", 0), getattr(n, "orelse", 0)))
        field = "body" if getattr(owner, "body", None) is block else "orelse"
        for i, statement in enumerate(block):
            if isinstance(statement, ast.Expr) and _is_hand_shake(statement.value):
                text = _text(statement)

                def drop(node, field=field, i=i):
                    getattr(node, field)[i] = ast.Pass()

                yield f"no {text}", at(owner, drop)
                before = block[i - 1] if i else None
                moves = _called(statement.value).startswith(("mbarrier.arrive", "gl.atomic_"))
                if moves and isinstance(before, ast.Expr) and isinstance(before.value, ast.Call):

                    def swap(node, field=field, i=i):
                        part = getattr(node, field)
                        part[i - 1], part[i] = part[i], part[i - 1]

                    yield f"{text} before {_text(before)}", at(owner, swap)
                if _called(statement.value) == "tcgen05_commit":

                    def at_issue(node, field=field, i=i):
                        call = getattr(node, field)[i].value
                        call.func = ast.parse("mbarrier.arrive", mode="eval").body
                        call.keywords = [ast.keyword("count", ast.Constant(1))]

                    yield f"arrives at issue: {text}", at(owner, at_issue)

                    def first(node, field=field, i=i):
                        part = getattr(node, field)
                        part.insert(0, part.pop(i))

                    if i:
                        yield f"{text} first", at(owner, first)
    yield from _expressions(nodes, at)


def _expressions(nodes, at):
    for node in nodes:
        if isinstance(node, ast.Call):
            name, text = _called(node), _text(node)
            if name == "mbarrier.wait":

                def other_phase(call):
                    call.args[1] = ast.BinOp(call.args[1], ast.BitXor(), ast.Constant(1))

                yield f"other phase of {text}", at(node, other_phase)
            if name in ("mbarrier.expect", "mbarrier.init") or name.startswith("gl.atomic_add"):
                given = node.args[1] if len(node.args) > 1 else None

                def one_more(call, is_size=name == "mbarrier.expect"):
                    more = ast.Constant(16 if is_size else 1)
                    if len(call.args) > 1:
                        call.args[1] = ast.BinOp(call.args[1], ast.Add(), more)
                    else:
                        call.keywords[0].value = ast.BinOp(call.keywords[0].value, ast.Add(), more)

                if given is not None or node.keywords:
                    yield f"one more in {text}", at(node, one_more)
            if name == "mbarrier.arrive":

                def counts_more(call):
                    for keyword in call.keywords:
                        keyword.value = ast.BinOp(keyword.value, ast.Add(), ast.Constant(1))

                yield f"counts one more: {text}", at(node, counts_more)
            if name == "warpgroup_mma_wait":

                def not_waited(call):
                    deps = next(k.value for k in call.keywords if k.arg == "deps")
                    call.func = ast.Lambda(
                        ast.arguments([], [ast.arg("it")], None, [], [], None, []), ast.Name("it")
                    )
                    call.args, call.keywords = [deps.elts[0]], []
                    for part in ast.walk(call):
                        if isinstance(part, ast.Name):
                            part.ctx = ast.Load()

                yield f"no {text}", at(node, not_waited)
            if name.startswith("mbarrier.") and node.args:
                first = node.args[0]
                if _called(first).endswith(".index") and "& 1" in ast.unparse(first.args[0]):

                    def other_index(call):
                        part = call.args[0].args
                        part[0] = ast.BinOp(part[0], ast.BitXor(), ast.Constant(1))

                    yield f"other index in {text}", at(node, other_index)
            if name == "first_stage" and isinstance(node.args[0], ast.Constant):

                def other_start(call):
                    call.args[0] = ast.Constant(1 - call.args[0].value)

                yield f"other phase of {text}", at(node, other_start)
            if name == "barriers" and len(node.args) > 1:

                def more_arrivals(call):
                    call.args[1] = ast.BinOp(call.args[1], ast.Add(), ast.Constant(1))

                yield f"one arrival more in {text}", at(node, more_arrivals)
        if isinstance(node, ast.Compare) and re.search(r"\b(STOP|_MISSED)\b", ast.unparse(node)):

            def passes(test):
                test.left = test.comparators[0]

            yield f"passes whatever is there: {_text(node)}", at(node, passes)
        yield from _other_word(node, at)
        yield from _weaker(node, at)
        if isinstance(node, ast.Call):
            continue
        if (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.BitXor)
            and isinstance(node.right, ast.Constant)
            and node.right.value == 1
        ):

            def same_phase(part):
                part.right = ast.Constant(0)

            yield f"{_text(node)} stays", at(node, same_phase)


def _other_word(node, at):
    """Another word, or another value, where a role waits for one in global memory or stores it."""
    name = _called(node)
    word, value = WORDS.get(name, (0, None) if re.match(r"[gt]l\.atomic_", name) else (None, None))
    if word is None:
        return
    pointer = node.args[word]
    while _called(pointer) == "gl.multiple_of":
        pointer = pointer.args[0]
    if isinstance(pointer, ast.BinOp) and isinstance(pointer.op, ast.Add):

        def first_word(part):
            part.right = ast.Constant(0)

        yield f"not at {_text(pointer.right)}: {_text(node)}", at(pointer, first_word)
    if value is not None and name != "_tell":

        def one_less(call):
            call.args[value] = ast.BinOp(call.args[value], ast.Sub(), ast.Constant(1))

        yield f"one less in {_text(node)}", at(node, one_less)


def _weaker(node, at):
    """Semantics and scopes: arguments of a call, or what a name is set to."""
    if isinstance(node, ast.Call):
        parts = [k.value for k in node.keywords if k.arg in ("sem", "scope")]
        parts += node.args if _called(node) == "bounded_wait" else []
    elif isinstance(node, ast.AnnAssign | ast.Assign):
        if any(isinstance(part, ast.Call) for part in ast.walk(node)) or node.value is None:
            return
        parts = [part for part in ast.walk(node.value) if isinstance(part, ast.Constant)]
    else:
        return
    for part in parts:
        if isinstance(part, ast.Constant) and part.value in WEAKER:

            def weaken(constant):
                constant.value = WEAKER[constant.value]

            yield f"{part.value} is {WEAKER[part.value]} in {_text(node)}", at(part, weaken)


def edited(module, function, old, new):
    """A mutant by hand: a part of a function's source, as `ast.unparse` writes it, replaced."""
    made, tree = functions(module.__name__)[function]
    text = ast.unparse(tree)
    assert text.count(old) == 1, f"{function} has {old!r} {text.count(old)} times"
    changed = ast.parse(text.replace(old, new)).body[0]
    short = short_name(module.__name__)
    return Mutant(short, function, f"{new!r} for {old!r}", compiled(made, changed))


def _text_name(function, arguments):
    return function if arguments is None else f"{function}({', '.join(arguments)})"


def mutants(modules, texts):
    """All mutants of the functions of some modules, and of PTX.

    texts  [(module, function that gives PTX, its arguments; or a constant that is PTX, None)]
    """
    found = {}
    for module in modules:
        name = module.__name__
        for function, (made, tree) in sorted(functions(name).items()):
            for what, change in _changes(tree):
                other = copy.deepcopy(tree)
                change(other)
                short = short_name(name)
                mutant = Mutant(short, function, what, compiled(made, other))
                key, number = mutant.name, 2
                while key in found:
                    key, number = f"{mutant.name} ({number})", number + 1
                found[key] = Mutant(short, function, key.partition(": ")[2], mutant.code)
    for module, function, arguments in texts:
        text, short = device.MODULES[module.__name__][function], short_name(module.__name__)
        of = _text_name(function, arguments)
        if arguments is not None:
            text = text(*arguments)
        for what, pattern, instead in TEXTS:
            if re.search(pattern, text):
                mutant = Mutant(short, of, what, None, (arguments, re.sub(pattern, instead, text)))
                found[mutant.name] = mutant
    return found


# -- what a loop carries ---------------------------------------------------------------------------


def _aliases(node):
    """(name, other, statement) of every `name = other`; other: a name, or a field of one."""
    for found in ast.walk(node):
        if isinstance(found, ast.Assign) and isinstance(found.value, ast.Name | ast.Attribute):
            for target in found.targets:
                if isinstance(target, ast.Name):
                    yield target.id, ast.unparse(found.value), found


def _root(other):
    """The name of which `other` is a field, or itself."""
    return other.partition(".")[0]


def _stored(node):
    """Names that are set."""
    return {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def as_compiled(tree):
    """A function as Gluon's compiler takes it: some aliases in loops are not carried.

    `name = other` before a loop and again in it, where the loop sets `other`: the compiler, at its
    first look, finds the same value in both, and `name` is for ever the first one.
    """
    for loop in [n for n in ast.walk(tree) if isinstance(n, ast.For | ast.While)]:
        inside = list(_aliases(loop))
        mine = {id(statement) for _, _, statement in inside}
        outside = {(a, b) for a, b, statement in _aliases(tree) if id(statement) not in mine}
        for name, other, statement in inside:
            if (name, other) in outside and _root(other) in _stored(loop):
                statement.value = ast.copy_location(ast.Name(name, ast.Load()), statement.value)
    return tree


def carried_traps(module):
    """The same alias before a loop too, where that changes nothing in Python."""
    for function, (made, tree) in sorted(functions(module.__name__).items()):
        for at, statement in enumerate(tree.body):
            loops = [n for n in ast.walk(statement) if isinstance(n, ast.For | ast.While)]
            before = set().union(*map(_stored, tree.body[:at])) if at else set()
            for name, other in sorted({(a, b) for loop in loops for a, b, _ in _aliases(loop)}):
                if _root(other) in before and name not in before:
                    changed = copy.deepcopy(tree)
                    alias = ast.parse(f"{name} = {other}").body[0]
                    changed.body.insert(at, ast.copy_location(alias, statement))
                    short = short_name(module.__name__)
                    what = f"{name} = {other} before the loop too"
                    yield Mutant(short, function, what, compiled(made, changed))


def _made(mutant):
    for name in device.MODULES:
        if short_name(name) == mutant.module and mutant.function in functions(name):
            return functions(name)[mutant.function][0]
    raise KeyError(mutant.name)


@contextlib.contextmanager
def planted(mutant):
    """The scheduled kernels have the bug."""
    if mutant.code is not None:
        made = _made(mutant)
        code = made.__code__
        try:
            made.__code__ = mutant.code
            yield
        finally:
            made.__code__ = code
        return
    arguments, text = mutant.text
    key = mutant.function.partition("(")[0]
    name = next(n for n in device.MODULES if short_name(n) == mutant.module)
    module = device.MODULES[name]
    given = module[key]
    try:
        module[key] = (
            text if arguments is None
            else lambda *args: text if args == arguments else given(*args)
        )  # fmt: skip
        yield
    finally:
        module[key] = given


# -- which functions a case runs -------------------------------------------------------------------


@functools.cache
def _noting(module, function):
    """The code of a function that says when it is called."""
    made, tree = functions(module)[function]
    other = copy.deepcopy(tree)
    key = ast.Tuple([ast.Constant(short_name(module)), ast.Constant(function)], ast.Load())
    call = ast.Call(ast.Name("_reached", ast.Load()), [key], [])
    other.body.insert(0, ast.copy_location(ast.Expr(call), tree))
    return compiled(made, other)


@contextlib.contextmanager
def reached(texts):
    """The set of (module, function) that run meanwhile, functions that give PTX included."""
    seen, codes, given = set(), [], []

    def noted(short, function, make):
        def text(*arguments):
            seen.add((short, f"{function}({', '.join(arguments)})"))
            return make(*arguments)

        return text

    try:
        calls = [(module.__name__, name) for module, name, given_ in texts if given_ is not None]
        for name, function in set(calls):
            there = device.MODULES[name]
            given.append((there, function, there[function]))
            there[function] = noted(short_name(name), function, there[function])
        for name in list(device.MODULES):
            for function, (made, _) in functions(name).items():
                codes.append((made, made.__code__))
                made.__globals__["_reached"] = seen.add
                made.__code__ = _noting(name, function)
        yield seen
        for module, constant, arguments in texts:
            users = [
                (short_name(module.__name__), function)
                for function, (_, tree) in functions(module.__name__).items()
                if any(isinstance(n, ast.Name) and n.id == constant for n in ast.walk(tree))
            ]
            if arguments is None and not seen.isdisjoint(users):
                seen.add((short_name(module.__name__), constant))
    finally:
        for made, code in codes:
            made.__code__ = code
        for there, function, make in given:
            there[function] = make
