#!/usr/bin/env bash
# Trains a recipe of a published run: run_recipe.sh RECIPE [key=value ...]. `megatron-stare recipes` lists them.
#   DRY_RUN=1 bash scripts/run_recipe.sh short_cot_qwen2.5_math_7b    (prints; starts nothing)
#   RAY_ADDRESS=head:6379 bash scripts/run_recipe.sh short_cot_qwen2.5_math_7b_grpo run.seed=2
# All variables are those of scripts/launch.sh; --help lists them.
set -euo pipefail
# shellcheck source=scripts/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
launch "$@"
