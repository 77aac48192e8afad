#!/usr/bin/env bash
# What a user installs: build a wheel, install it alone into an empty folder beside the machine's
# torch, and run README's snippets and one command there, out of sight of the checkout.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup "[test]" torch numpy rich safetensors typer
python=$("$PY" -c "import sys; print(sys.executable)")
isolation=""    # setuptools that can build this is used as it is, an older one is not
if "$python" -c "import setuptools as s; exit(int(s.__version__.split('.')[0]) < 77)" 2>/dev/null; then
    isolation=--no-build-isolation
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git ls-files -z README.md LICENSE pyproject.toml megamoe | xargs -0 cp --parents -t "$folder"
pip() { "$python" -m pip --disable-pip-version-check "$@"; }
(cd "$folder" && pip wheel --quiet --no-deps $isolation -w wheels .)
pip install --quiet --no-deps --target "$folder/site" "$folder"/wheels/*.whl
"$python" - "$folder/snippets.py" README.md <<'EOF'
import re
import sys

fences = re.findall(r"^```python\n(.*?)^```", open(sys.argv[2]).read(), re.DOTALL | re.MULTILINE)
assert fences
open(sys.argv[1], "w").write("\n".join(fences))
EOF
mkdir "$folder/empty" && cd "$folder/empty"
export PYTHONPATH="$folder/site"
"$python" -c "import megamoe; assert megamoe.__file__.startswith('$folder'), megamoe.__file__"
"$python" ../snippets.py
"$python" -m megamoe plan tiny > plan.txt
"$python" -c "from megamoe.bench import peers; assert peers.load(peers.RECORDED).cells"
say "the wheel runs README's snippets"
