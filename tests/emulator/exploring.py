"""Many interleavings of a case, and the shortest that was found of a failing one."""

import itertools
import json
import os
import tempfile
from pathlib import Path

from megamoe.errors import MegaMoEError
from tests.emulator.picture import page
from tests.emulator.policies import Recorded, Replayed, Starved, policy_of

MOST_RUNS = 80  # to make one failure shorter


class Found(AssertionError):
    """A failure, with its seed and the shortest interleaving that still shows it."""

    def __init__(self, case, seed, error, how, log):
        self.case, self.seed, self.error, self.log = case, seed, error, log
        self.title = f"{case.name}, seed {seed}: {error}"
        self.picture = self._draw(how)
        super().__init__(
            f"{self.title}\n{how}\nits last steps:\n{last_steps(log)}\na picture: {self.picture}"
        )

    def _draw(self, how):
        """The path of a page; and beside it of a trace for Perfetto."""
        named = os.environ.get("MEGAMOE_PROOF_TRACES")
        folder = Path(named or Path(tempfile.gettempdir()) / "megamoe-proof")
        folder.mkdir(exist_ok=True)
        path = folder / f"{self.case.name}-{self.seed}.html"
        path.write_text(page(self.title, how, self.log))
        path.with_suffix(".json").write_text(json.dumps(perfetto(self.log)))
        return path


def perfetto(log):
    """A run as events of a trace: a line for each role and operation, a microsecond a step."""
    lines = {name: i for i, name in enumerate(dict.fromkeys(name for name, _ in log))}
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": name}}
        for name, i in lines.items()
    ]
    return names + [
        {"ph": "X", "name": what, "pid": 0, "tid": lines[name], "ts": i, "dur": 1}
        for i, (name, what) in enumerate(log)
    ]


def in_words(changes):
    """Preemptions in words."""
    return "\n".join(
        f"  at step {step} of {role or 'the start'}: {name}"
        for (role, step, _), name in changes.items()
    )


def last_steps(log, most=25):
    """The end of a run, the steps of a role in a row on one line."""
    lines = [
        f"  {name}: {', '.join(what for _, what in steps)}"
        for name, steps in itertools.groupby(log, key=lambda entry: entry[0])
    ]
    return "\n".join(lines[-most:])


def attempt(case, policy, log=None):
    """The error of one run, or None."""
    try:
        case.run(policy, log)
    except (AssertionError, MegaMoEError) as error:
        return error
    return None


def shortened(case, changes, most_runs=MOST_RUNS):
    """A subset of the changes that still fails, found by leaving parts out."""
    parts = 2
    runs = 0
    while changes and runs < most_runs:
        items, size = list(changes.items()), -(-len(changes) // parts)
        for start in range(0, len(items), size):
            fewer = dict(items[:start] + items[start + size :])
            replayed = Replayed(fewer)
            runs += 1
            if attempt(case, replayed) is not None:
                changes, parts = replayed.made, max(parts - 1, 2)
                break
            if runs >= most_runs:
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(changes))
    return changes


def explore(case, seeds):
    """Run a case under the policy of each seed; raises `Found` at the first failure."""
    num = 0
    for seed in seeds:
        error = attempt(case, policy_of(seed))
        if error is not None:
            recorded = Recorded(policy_of(seed))
            error = attempt(case, recorded) or error
            raise _found(case, seed, error, recorded.changes) from error
        num += 1
    return num


def _found(case, seed, error, changes):
    """The failure as a short story: a run undisturbed, with one slow role, or with few changes."""
    log = []
    if attempt(case, Replayed({}), log) is not None:
        return Found(case, seed, attempt(case, Replayed({})), "an undisturbed run shows it", log)
    for name in sorted({role for role, _, _ in changes if role}):
        log = []
        again = attempt(case, Starved(name), log)
        if again is not None:
            how = f"it shows where {name} runs only when nobody else can"
            return Found(case, seed, again, how, log)
    changes = shortened(case, changes)
    log = []
    again = attempt(case, Replayed(changes), log)
    how = f"{len(changes)} changes of an undisturbed run show it:\n{in_words(changes)}"
    return Found(case, seed, again or error, how, log)


def is_found(case, seeds):
    """(the first seed that shows a fault, the error), or (None, None)."""
    for seed in seeds:
        error = attempt(case, policy_of(seed))
        if error is not None:
            return seed, error
    return None, None
