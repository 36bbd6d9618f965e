#!/usr/bin/env bash
# Makes .venv-sglang: SGLang for CPUs, exactly as scripts/sglang-cpu.lock says, and this project's platform plug-in.
# Its own environment because its pins are not the trainer's. Seconds when nothing has changed. Run it, or source it
# after setup_env.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/python_env.sh"

build_sglang_env() {
    local python
    # wheels of the lock exist for these; SGLang's own is built per version
    python="$(find_python SGLANG_PYTHON python3.11 python3.12 python3.10)"
    new_env "$ROOT/.venv-sglang" "$python" 4000
    pip_install "$ROOT/.venv-sglang" --no-deps -r "$ROOT/scripts/sglang-cpu.lock"
    # the entry point of the platform plug-in is found through the installed project
    pip_install "$ROOT/.venv-sglang" --no-deps --no-build-isolation -e "$ROOT"
}

build_if_changed "$ROOT/.venv-sglang" build_sglang_env "$ROOT/scripts/sglang-cpu.lock" "$ROOT/scripts/setup_sglang.sh"
