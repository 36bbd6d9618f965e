#!/usr/bin/env bash
# Makes .venv-sglang: SGLang for CPUs, exactly as scripts/sglang-cpu.lock says, and this project's platform plug-in.
# Its own environment because its pins are not the trainer's; its Python may be another, which SGLANG_PYTHON names.
# Seconds when nothing has changed. Run it, or source it after setup_env.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/python_env.sh"
[ "${BASH_SOURCE[0]}" != "$0" ] || setup_arguments "$@"

build_sglang_env() {
    local venv="$1" found
    found="$(find_python SGLANG_PYTHON)"
    new_env "$venv" "${found%%$'\n'*}" "${found##*$'\n'}" 7000
    install_sglang "$venv"
}

build_if_changed "$ROOT/.venv-sglang" SGLANG_PYTHON build_sglang_env \
    "$ROOT/scripts/sglang-cpu.lock" "$ROOT/scripts/setup_sglang.sh"
