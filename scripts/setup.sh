# Sourced by ./run and ./test: makes PY, a Python that has everything, and says what it does.
#
# A Python that can already import all that is needed is used as it is. Otherwise a .venv is made
# beside this checkout; a torch that the machine's Python already has is reused, not downloaded again.
#   setup EXTRA MODULE...   EXTRA: "" or "[test]"; MODULE...: what must be importable

say() { echo "megamoe: $*" >&2; }

has() { "$1" -c "import sys, $2; sys.exit(sys.version_info < (3, 11))" 2>/dev/null; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if has "$candidate" venv; then echo "$candidate"; return; fi
    done
    say "needs Python 3.11 or newer with venv; found $(python3 --version 2>&1); set PYTHON to one"
    return 1
}

setup() {
    local extra=$1 modules
    shift
    modules=$(IFS=,; echo "$*")
    local python stamp want site="" constraints=constraints.txt
    python=$(find_python) || exit 1
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
    want="$extra $(cat pyproject.toml constraints.txt | cksum)"
    stamp=.venv/.megamoe-setup
    if [ -f "$stamp" ] && grep -qxF "$want" "$stamp" && has .venv/bin/python "$modules"; then
        PY=.venv/bin/python
        return
    fi
    if has "$python" "$modules"; then
        PY=$python
        say "using $python, which has everything"
        return
    fi
    if has "$python" torch; then
        site=--system-site-packages
        say "making .venv on top of the machine's torch $("$python" -c 'import torch; print(torch.__version__)')"
    else
        say "making .venv and installing torch and the rest (a few minutes the first time)"
    fi
    [ -x .venv/bin/python ] || "$python" -m venv $site .venv
    if has .venv/bin/python torch; then     # keep it: a pin must not replace it
        constraints=.venv/constraints.txt
        grep -vE '^(torch|triton)==' constraints.txt > "$constraints"
    fi
    .venv/bin/python -m pip install --quiet --disable-pip-version-check \
        -c "$constraints" -e ".$extra"
    echo "$want" >> "$stamp"
    PY=.venv/bin/python
}
