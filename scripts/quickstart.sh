#!/usr/bin/env bash
# Trains the tiny model of assets/ with STARE on this machine: two Megatron ranks, a rollout engine, about six minutes.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash scripts/quickstart.sh [--seed N] [--steps N] [--algorithm A | --compare A] [--engine E] [--resume] [--dry-run] [key=value ...]

  --seed N        seed of data order and sampling (default 1)
  --steps N       training steps (default 300)
  --algorithm A   stare (default); grpo: the same surrogate and aggregation without STARE's weights and gate; or any
                  other method of docs/algorithms/README.md with its own defaults
  --compare A     train with STARE and then with A from the same start and seed; one report shows both
  --engine E      local (default): rollouts in process; sglang: from a real SGLang server, much slower at this size
  --resume        continue the newest quickstart, or the newest comparison, that was interrupted (give the same
                  options again)
  --dry-run       check everything, print the resolved configuration and stop
  key=value       any setting of configs/quickstart.yaml, such as optimizer.lr=1e-4
TEXT
}

usage_error() { usage >&2; printf 'error: %s\n' "$1" >&2; exit 2; }

# The overrides that turn the quickstart into another method's run.
method() {
    case "$1" in
    stare) ;; # what the configuration says
    # what STARE is compared with differs from it in nothing but weights and gate
    grpo) echo algorithm=grpo algorithm.aggregation=token_mean algorithm.clip_high=0.28 algorithm.dual_clip=10 ;;
    *) echo "algorithm=$1" ;;
    esac
}

arguments=()
resume=
dry_run=
algorithm=stare
compare=
engine=local
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) usage; exit 0 ;;
    --seed | --steps | --algorithm | --compare | --engine)
        [ $# -ge 2 ] || usage_error "$1 needs a value"
        case "$1" in
        --seed) arguments+=("run.seed=$2") ;;
        --steps) arguments+=("run.steps=$2") ;;
        --algorithm) algorithm="$2" ;;
        --compare) compare="$2" ;;
        --engine) engine="$2" ;;
        esac
        shift 2
        ;;
    --resume) resume=--resume; shift ;;
    --dry-run) dry_run=--dry-run; shift ;;
    -*) usage_error "unknown option $1" ;;
    *) arguments+=("$1"); shift ;;
    esac
done

[ "$compare" != stare ] || usage_error "--compare needs another method than stare"
case "$engine" in
local | sglang) ;;
*) usage_error "unknown engine $engine: local or sglang" ;;
esac

source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"
THERE="$PWD"
cd "$ROOT"
if [ "$engine" = sglang ]; then
    source scripts/setup_sglang.sh
    arguments=(rollout.engine=sglang ${arguments[@]+"${arguments[@]}"})
fi

train() { # method, then what comes before the user's own arguments
    local name="$1"
    shift
    # shellcheck disable=SC2046  # the method's overrides are words
    "$PYTHON" -m megatron_stare.cli train configs/quickstart.yaml $(method "$name") "$@" ${arguments[@]+"${arguments[@]}"} $dry_run
}

# The newest comparison of stare with the same method, or nothing. Its runs lie in folders named by their methods.
newest_comparison() {
    local folder run newest=
    for folder in runs/compare-*/; do
        for run in "$folder"*/config.yaml; do
            case "$(basename "$(dirname "$run")")" in
            stare | "$compare") ;;
            *) continue 2 ;; # with another method, or empty
            esac
        done
        newest="${folder%/}"
    done
    echo "$newest"
}

# One run of a comparison: begun, or, where that is asked for and it has begun already, continued.
half() {
    local name="$1" continued=
    [ -z "$resume" ] || [ ! -e "$both/$name/config.yaml" ] || continued=--resume
    train "$name" "run.name=$name" "run.dir=$both/$name" $continued
}

# The folder of the run that was just made: what was asked for, or the newest.
run_folder() {
    local word file newest=
    for word in ${arguments[@]+"${arguments[@]}"}; do
        case "$word" in
        run.dir=*) newest="${word#run.dir=}" ;;
        esac
    done
    [ -z "$newest" ] || { echo "$newest"; return; }
    for file in runs/*/config.yaml; do
        [ -e "$file" ] || continue
        [ -n "$newest" ] && [ "$file" -ot "$newest/config.yaml" ] || newest="${file%/config.yaml}"
    done
    echo "$newest"
}

# A path as the folder that the script was called from has it.
seen_from_there() {
    case "$1" in
    /*) echo "${1#"$THERE/"}" ;;
    *) [ "$THERE" = "$ROOT" ] && echo "$1" || echo "$ROOT/$1" ;;
    esac
}

next_steps() { # folder of a run, its report
    cat <<TEXT

activate:  source $(seen_from_there "$(dirname "$PYTHON")/activate")
report:    $(seen_from_there "$2")
next:      megatron-stare init my-run --data problems.jsonl    # your data, your reward
           megatron-stare recipes                              # published runs
           megatron-stare status $(seen_from_there "$1")
TEXT
}

if [ -z "$compare" ]; then
    train "$algorithm" $resume
    folder="$(run_folder)"
    report="$folder/report.html"
else
    both="runs/compare-$(date +%Y%m%d-%H%M%S)"
    if [ -n "$resume" ]; then
        both="$(newest_comparison)"
        [ -n "$both" ] || fail "there is no comparison with $compare to resume under runs/" "leave --resume out to start one"
    fi
    half stare
    half "$compare"
    [ -n "$dry_run" ] ||
        "$PYTHON" -m megatron_stare.cli report "$both/stare" "$both/$compare" --out "$both/report.html"
    folder="$both/stare"
    report="$both/report.html"
fi
[ -n "$dry_run" ] || next_steps "$folder" "$report"
