#!/usr/bin/env bash
# Runs the project with releases that it does not pin, in an environment of their own.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash scripts/try_release.sh PACKAGE==VERSION ... [-- pytest's arguments ...]

Makes an environment as scripts/setup_env.sh does, in build/try/, installs these releases, trains the quickstart for
three steps and runs the tests that depend on them. The last line gives the number that passed; failures are above it.
Exit code 0: all passed; 1: something failed. The pins and .venv are left unchanged.

  bash scripts/try_release.sh megatron-core==0.19.0
  bash scripts/try_release.sh torch==2.14.1 transformers==5.24.0 -- -m "not slow"   # all that CI runs
  bash scripts/try_release.sh sglang==0.5.24            # the servers' environment; with another package: both

By default the tests are tests/megatron and tests/ops of the quick tier, and with sglang all that start a real server.
PYTHON names another Python, as for setup_env.sh.
TEXT
}

source "$(dirname "${BASH_SOURCE[0]}")/python_env.sh"
cd "$ROOT"

trainer=() servers=()
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    sglang==?*) servers+=("$1") ;;
    [a-z]*==?*) trainer+=("$1") ;;
    *) usage >&2; fail "$1 is not of the form PACKAGE==VERSION" "name a release, such as megatron-core==0.19.0" ;;
    esac
    shift
done
[ ${#trainer[@]} -gt 0 ] || [ ${#servers[@]} -gt 0 ] || { usage >&2; fail "no release is named" "name one, such as megatron-core==0.19.0"; }

found="$(find_python PYTHON)"
interpreter="${found%%$'\n'*}"
name="$(version_of "$interpreter")"
for release in ${trainer[@]+"${trainer[@]}"} ${servers[@]+"${servers[@]}"}; do name+="+$release"; done
folder="$ROOT/build/try/$name"
mkdir -p "$folder"
echo "trying ${name//+/, } on Python; all files are in $folder"

# What is pinned without what is tried.
others() {
    local tried
    tried="$(printf '%s\n' "${trainer[@]%%==*}")"
    grep -vixE "($(paste -sd'|' <<<"$tried"))==.*" "$ROOT/constraints.txt"
}

build_trainer() {
    local venv="$1"
    new_env "$venv" "$interpreter" "${found##*$'\n'}" 7000
    install_project "$venv"
    if [ ${#trainer[@]} -gt 0 ]; then
        others >"$folder/constraints.txt"
        # pip says that this project pins others, and installs them
        pip_install "$venv" -c "$folder/constraints.txt" "${trainer[@]}"
    fi
}

build_servers() {
    local venv="$1"
    new_env "$venv" "$interpreter" "${found##*$'\n'}" 7000
    install_sglang "$venv" "${servers[@]}"
}

build_if_changed "$folder/venv" NOTHING build_trainer "$ROOT/constraints.txt" "$ROOT/scripts/try_release.sh"
if [ ${#servers[@]} -gt 0 ]; then
    build_if_changed "$folder/venv-sglang" NOTHING build_servers "$ROOT/scripts/sglang-cpu.lock" "$ROOT/scripts/try_release.sh"
    export MEGATRON_STARE_SGLANG_PYTHON="$folder/venv-sglang/bin/python"
fi

python="$folder/venv/bin/python"
rm -rf "$folder/run"
came_out=0
echo "the quickstart, three steps"
if "$python" -m megatron_stare.cli train configs/quickstart.yaml run.steps=3 "run.dir=$folder/run" >"$folder/quickstart.log" 2>&1; then
    quickstart="passed"
else
    quickstart="failed"
    came_out=1
    tail -n 20 "$folder/quickstart.log" >&2
fi
if [ $# -eq 0 ]; then
    [ ${#trainer[@]} -eq 0 ] || set -- tests/megatron tests/ops -m "not slow and not wide and not sglang"
    [ ${#servers[@]} -eq 0 ] || set -- -m "sglang and not slow"
fi
"$python" -m pytest -n 2 --dist loadfile -rf "$@" | tee "$folder/tests.log" || came_out=1
echo "${name//+/, }: quickstart $quickstart; $(tail -n 1 "$folder/tests.log" | tr -d =)"
exit "$came_out"
