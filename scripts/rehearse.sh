#!/usr/bin/env bash
# Rehearses the launch of a recipe on nodes that are namespaces of this machine; --help says what it does.
#   bash scripts/rehearse.sh short_cot_qwen2.5_32b --nodes 16            real processes on two of them (root)
#   bash scripts/rehearse.sh short_cot_qwen2.5_32b --nodes 16 --paper    starts nothing
# PYTHON and SGLANG_PYTHON name the interpreters of both environments (.venv and .venv-sglang of this project).
set -euo pipefail
# shellcheck source=scripts/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
find_project_python
exec "$PYTHON" "$ROOT/tools/rehearse" "$@"
