#!/usr/bin/env bash
# Makes .venv with the pinned dependencies and this project, editable. Seconds when nothing has changed.
# Sourced by the other scripts; leaves $PYTHON pointing into .venv. May also be run by itself.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
NEEDED_MB=4000

fail() { printf 'error: %s\n  fix: %s\n' "$1" "$2" >&2; exit 2; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.12 python3.11 python3.10 python3; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.10 to 3.12 found (python3 is $(python3 --version 2>&1 || echo missing))" \
        "install one, or name it: PYTHON=/path/to/python3.11 bash $0"
}

build_env() {
    local python free_mb
    python="$(find_python)"
    "$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$python has no venv module" "install python3-venv"
    free_mb="$(df -Pm "$ROOT" | awk 'NR == 2 {print $4}')"
    [ "$free_mb" -ge "$NEEDED_MB" ] ||
        fail "only $free_mb MB free on the disk of $ROOT, the environment needs $NEEDED_MB" "free some space"
    echo "setting up $VENV with $("$python" --version) (a few minutes, once)"
    rm -rf "$VENV"
    "$python" -m venv "$VENV"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c "$ROOT/constraints.txt" setuptools wheel
    # torch first and alone: where a CPU build of this version is at hand, pip takes it
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c "$ROOT/constraints.txt" torch==2.13.0
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c "$ROOT/constraints.txt" \
        --no-build-isolation -e "$ROOT[dev]"
}

# the environment is as old as what it was made from
stamp="$(cat "$ROOT/constraints.txt" "$ROOT/pyproject.toml" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1) $ROOT"
if [ "$(cat "$VENV/.stamp" 2>/dev/null)" != "$stamp" ]; then
    build_env
    echo "$stamp" >"$VENV/.stamp"
fi
PYTHON="$VENV/bin/python"
export PYTHON
