#!/usr/bin/env bash
# Sets up .venv, checks format, lint and types, and runs the tests of one tier.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash scripts/test.sh [--all | --slow] [pytest's arguments ...]

  (none)     the quick tests: a few minutes, without SGLang
  --all      the quick tests, the wide ones and those with a real SGLang server, for which it sets up .venv-sglang
             (6 GB); what CI runs
  --slow     the slow tests alone, file by file, with a real SGLang server: hours. Run again, it resumes: files that
             passed at this commit are skipped. The table is benchmarks/results/slow_suite.json
  tests/ops  the tier's tests in this folder; -n 0 runs them in one process, for a debugger
TEXT
}

tier="not slow and not wide and not sglang"
served=
workers=3  # one more than the two cores, because many tests wait
case "${1:-}" in
-h | --help) usage; exit 0 ;;
--all) tier="not slow"; served=1; workers=2; shift ;;  # servers use the cores themselves
--slow) tier="slow"; served=1; shift ;;
esac

if [ -n "$served" ] && ! command -v bwrap >/dev/null; then
    echo "bubblewrap is missing, without which tests of the sandbox fail: apt-get install bubblewrap" >&2
fi
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
[ -z "$served" ] || source "$ROOT/scripts/setup_sglang.sh"
cd "$ROOT"

"$PYTHON" -m ruff format --check .
"$PYTHON" -m ruff check .
"$PYTHON" -m mypy
[ "$tier" != slow ] || exec "$PYTHON" tests/support/slow_shards.py "$@"
# workers with whole files: most tests are one process, and few use both cores
exec "$PYTHON" -m pytest -n "$workers" --dist loadfile -m "$tier" "$@"
