#!/usr/bin/env bash
# Sets up .venv and .venv-sglang, then checks format, lint and types and runs the tests. Arguments go to pytest.
#   bash scripts/test.sh             everything but the slow tests
#   bash scripts/test.sh --slow      the slow tests alone
#   bash scripts/test.sh tests/ops   some of them; -n 0 runs them in one process, for a debugger
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
source "$ROOT/scripts/setup_sglang.sh"
cd "$ROOT"

selection=(-m "not slow")
if [ "${1:-}" = --slow ]; then
    selection=(-m slow)
    shift
fi
"$PYTHON" -m ruff format --check .
"$PYTHON" -m ruff check .
"$PYTHON" -m mypy
# two workers, each with whole files: most tests are one process, and few use both cores
exec "$PYTHON" -m pytest -n 2 --dist loadfile "${selection[@]}" "$@"
