#!/usr/bin/env bash
# Makes the environment of another trainer, .venv-trl, .venv-verl or .venv-slime, with the packages of scripts/NAME.lock,
# for the tests of tests/select and the benchmarks of stare-select. Each has an environment of its own because its pins
# are not this project's; its Python may be another, which OTHER_PYTHON names. Seconds when nothing has changed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/python_env.sh"

case "${1:-}" in
trl | verl | slime) trainer="$1" ;;
-h | --help) echo "usage: bash scripts/setup_other_trainer.sh trl|verl|slime"; exit 0 ;;
*) fail "'${1:-}' is not a trainer" "bash scripts/setup_other_trainer.sh trl, verl or slime" ;;
esac
lock="$ROOT/scripts/$trainer.lock"

build_other_env() {
    local venv="$1" found
    found="$(find_python OTHER_PYTHON)"
    new_env "$venv" "${found%%$'\n'*}" "${found##*$'\n'}" 3000
    "$venv/bin/python" -m pip install --quiet --requirement "$lock"
}

build_if_changed "$ROOT/.venv-$trainer" OTHER_PYTHON build_other_env "$lock" "$ROOT/scripts/setup_other_trainer.sh"
