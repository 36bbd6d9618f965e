#!/usr/bin/env bash
# Trains the tiny model of assets/ with STARE on this machine: two Megatron ranks, a rollout engine, about five minutes.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash scripts/quickstart.sh [--seed N] [--steps N] [--algorithm stare|grpo] [--resume] [--dry-run] [key=value ...]

  --seed N        seed of data order and sampling (default 1)
  --steps N       training steps (default 300)
  --algorithm A   stare (default), or grpo: the same surrogate and aggregation without STARE's weights and gate
  --resume        continue the newest quickstart that was interrupted (give the same options again)
  --dry-run       check everything, print the resolved configuration and stop
  key=value       any setting of configs/quickstart.yaml, such as optimizer.lr=1e-4
TEXT
}

overrides=()
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) usage; exit 0 ;;
    --seed | --steps | --algorithm)
        [ $# -ge 2 ] || { usage >&2; printf 'error: %s needs a value\n' "$1" >&2; exit 2; }
        case "$1" in
        --seed) overrides+=("run.seed=$2") ;;
        --steps) overrides+=("run.steps=$2") ;;
        --algorithm)
            case "$2" in
            stare) ;; # what the configuration says
            # what STARE is compared with differs from it in nothing but weights and gate
            grpo) overrides+=(algorithm=grpo algorithm.aggregation=token_mean algorithm.clip_high=0.28 algorithm.dual_clip=10) ;;
            *) overrides+=("algorithm=$2") ;;
            esac
            ;;
        esac
        shift 2
        ;;
    --resume | --dry-run) overrides+=("$1"); shift ;;
    -*) usage >&2; printf 'error: unknown option %s\n' "$1" >&2; exit 2 ;;
    *) overrides+=("$1"); shift ;;
    esac
done
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
cd "$ROOT"
exec "$PYTHON" -m megatron_stare.cli train configs/quickstart.yaml ${overrides[@]+"${overrides[@]}"}
