#!/usr/bin/env bash
# Makes .venv-sglang: SGLang for CPUs, exactly as scripts/sglang-cpu.lock says, and this project's platform plug-in.
# Its own environment because its pins are not the trainer's. Seconds when nothing has changed. Run it, or source it
# after setup_env.sh.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SGLANG_VENV="$ROOT/.venv-sglang"
SGLANG_LOCK="$ROOT/scripts/sglang-cpu.lock"
SGLANG_NEEDED_MB=4000

sglang_fail() { printf 'error: %s\n  fix: %s\n' "$1" "$2" >&2; exit 2; }

find_sglang_python() { # wheels of the lock exist for these; SGLang's own is built per version
    local candidate
    for candidate in ${SGLANG_PYTHON:-} python3.11 python3.12 python3.10 python3; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    sglang_fail "no Python 3.10 to 3.12 with a venv module found" "install one, or name it: SGLANG_PYTHON=/path/to/python3.11"
}

build_sglang_env() {
    local python free_mb
    python="$(find_sglang_python)"
    free_mb="$(df -Pm "$ROOT" | awk 'NR == 2 {print $4}')"
    [ "$free_mb" -ge "$SGLANG_NEEDED_MB" ] ||
        sglang_fail "only $free_mb MB free on the disk of $ROOT, SGLang's environment needs $SGLANG_NEEDED_MB" "free some space"
    echo "setting up $SGLANG_VENV with $("$python" --version) (a few minutes, once)"
    rm -rf "$SGLANG_VENV"
    "$python" -m venv "$SGLANG_VENV"
    "$SGLANG_VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r "$SGLANG_LOCK"
    # the entry point of the platform plug-in is found through the installed project
    "$SGLANG_VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e "$ROOT"
}

sglang_stamp="$(cat "$SGLANG_LOCK" "$ROOT/pyproject.toml" "$ROOT/scripts/setup_sglang.sh" | sha256sum | cut -d' ' -f1) $ROOT"
if [ "$(cat "$SGLANG_VENV/.stamp" 2>/dev/null)" != "$sglang_stamp" ]; then
    build_sglang_env
    echo "$sglang_stamp" >"$SGLANG_VENV/.stamp"
fi
