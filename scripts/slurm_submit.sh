#!/usr/bin/env bash
# Submits a recipe, or a script of yours, as a Slurm job. The job starts Ray on its nodes, is requeued at its time
# limit, and resumes by itself.
#   bash scripts/slurm_submit.sh short_cot_qwen2.5_math_7b
#   NODES=16 TIME=24:00:00 PARTITION=h100 bash scripts/slurm_submit.sh short_cot_qwen2.5_32b key=value
#   bash scripts/slurm_submit.sh my_run.sh key=value
# The variables of scripts/launch.sh also apply to the job.
#   NODES            nodes of the job, to which a recipe is adapted (recipe: as many as `megatron-stare plan` counts;
#                    script: 2)
#   GPUS_PER_NODE    GPUs to request from Slurm per node; 0: requests none, and plans nothing (8)
#   CPUS_PER_NODE    CPUs to request from Slurm per node, for one task (all: the job has the nodes to itself)
#   TIME             time limit of one start of the job, in Slurm's form (24:00:00)
#   GRACE_S          seconds before that limit at which the run is told to finish its step, save and end, and the job is
#                    requeued; if a step and a save take longer, the step is lost (recipe: twice the time that
#                    `megatron-stare plan` predicts for both, at least 300; script: 300)
#   PARTITION ACCOUNT QOS JOB_NAME RESERVATION    as in Slurm (Slurm's; JOB_NAME: the name of the recipe or script)
#   SBATCH_ARGS      further arguments for sbatch, such as --exclude=node7
#   LOG              file for the job's output, %j is the job's number (WORK/slurm-%j.log)
#   RAY_PORT         port of the head (6379)
#   WAIT_S           seconds within which all nodes must join (300)
#   RUN_DIR          run directory (WORK/runs/RECIPE-JOB); set it to resume the run of an earlier job
#   WORK DRY_RUN     as in scripts/launch.sh; DRY_RUN=1 also prints what the job would do
# A job that is requeued, here or by Slurm when a node fails, resumes its run in RUN_DIR from the newest checkpoint;
# after a node failed, up to run.checkpoint_every steps are repeated. A run that ends by itself ends the job, unless it
# was killed, or its exit code says that it should be resumed (STOP_AFTER, a lost node or cluster). The job of a recipe
# is not requeued if two starts in a row made no checkpoint.
# scancel --batch --signal=USR1 JOB saves and requeues, --signal=TERM saves and ends. A plain scancel also ends Ray, and
# saves nothing. For preemption, Slurm needs PreemptParameters=send_user_signal and a GraceTime of GRACE_S.
set -euo pipefail
ROOT="${MEGATRON_STARE_ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}" # Slurm runs a copy of this file
# shellcheck source=scripts/launch.sh
source "$ROOT/scripts/launch.sh"
TO_BE_CONTINUED=75 # exit code of a run that saved because it was told to, or out of time
RUN_RECIPE="$ROOT/scripts/run_recipe.sh"
export DRY_RUN="${DRY_RUN:-0}"

# The recipe, or the name of another script. Arguments: the script and its own.
name_of() { if [ "$1" = "$RUN_RECIPE" ]; then echo "$2"; else basename "$1" .sh; fi; }

# Seconds of a time limit as Slurm writes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; huge for UNLIMITED.
seconds_of() {
    local days=0 clock="$1" parts
    case "$clock" in
    UNLIMITED | INFINITE) echo 2147483647; return ;;
    *-*) days="${clock%%-*}" clock="${clock#*-}" ;;
    esac
    IFS=: read -r -a parts <<<"$clock"
    case "$1:${#parts[@]}" in
    *-*:[123] | *:3) parts=("${parts[@]}" 0 0) ;; # hours first
    *) parts=(0 "${parts[@]}" 0) ;;               # minutes first
    esac
    [[ "$days${parts[0]}${parts[1]}${parts[2]}" =~ ^[0-9]+$ ]] ||
        fail "TIME is $1" "a limit as Slurm writes it, such as 24:00:00 or 2-00:00:00"
    echo $(((10#$days * 24 + 10#${parts[0]}) * 3600 + 10#${parts[1]} * 60 + 10#${parts[2]}))
}

# NODES and GRACE_S, where they are not given, of the plan of a recipe. Arguments: the recipe, key=value words.
take_size_of_recipe() {
    local settings
    settings_of_recipe "$@"
    on_gpus || return 0
    # the recipe's paths begin in WORK, as they do in the job
    pushd "$WORK" >/dev/null 2>&1 || fail "there is no folder $WORK" "set WORK to a folder that all nodes see"
    plan_of "$1"
    popd >/dev/null
    [ -z "${NODES:-}" ] || [ "$NODES" = "$planned_nodes" ] ||
        fail "NODES is $NODES, and the layout that is given needs $planned_nodes" "leave NODES or the layout out"
    NODES="$planned_nodes" GRACE_S="${GRACE_S:-$planned_grace_s}"
}

submit() {
    local script="${1:-}"
    case "$script" in
    -h | --help) usage_of "$0"; exit 0 ;;
    "" | -* | *=*) fail "no recipe is named" "slurm_submit.sh short_cot_qwen2.5_math_7b" ;;
    *.sh)
        [ -f "$script" ] || fail "there is no script $script" "give a file, or a recipe of megatron-stare recipes"
        script="$(cd "$(dirname "$script")" && pwd)/$(basename "$script")"
        shift
        ;;
    *) script="$RUN_RECIPE" ;;
    esac
    one_of DRY_RUN 0 1
    export MEGATRON_STARE_ROOT="$ROOT" WORK="${WORK:-$PWD}"
    local gpus="${GPUS_PER_NODE:-8}" time="${TIME:-24:00:00}" limit
    [ "$script" != "$RUN_RECIPE" ] || take_size_of_recipe "$@"
    export NODES="${NODES:-2}" GRACE_S="${GRACE_S:-300}"
    limit="$(seconds_of "$time")"
    [ "$GRACE_S" -le 65535 ] || fail "GRACE_S is $GRACE_S, and Slurm takes at most 65535" "set STOP_AFTER and GRACE_S=300"
    [ "$GRACE_S" -lt "$limit" ] ||
        fail "the limit TIME=$time is $limit s, and the run would be told to save $GRACE_S s before it" \
            "a longer TIME, or a GRACE_S that is below it and longer than a step and a save"
    local sbatch=(sbatch --requeue --open-mode=append "--signal=B:USR1@$GRACE_S" "--nodes=$NODES"
        --ntasks-per-node=1 "--time=$time" "--job-name=${JOB_NAME:-$(name_of "$script" "$@")}"
        "--output=${LOG:-$WORK/slurm-%j.log}" "--chdir=$WORK" --export=ALL)
    [ "$gpus" = 0 ] || sbatch+=("--gpus-per-node=$gpus")
    if [ -n "${CPUS_PER_NODE:-}" ]; then sbatch+=("--cpus-per-task=$CPUS_PER_NODE"); else sbatch+=(--exclusive --mem=0); fi
    [ -z "${PARTITION:-}" ] || sbatch+=("--partition=$PARTITION")
    [ -z "${ACCOUNT:-}" ] || sbatch+=("--account=$ACCOUNT")
    [ -z "${QOS:-}" ] || sbatch+=("--qos=$QOS")
    [ -z "${RESERVATION:-}" ] || sbatch+=("--reservation=$RESERVATION")
    local words
    read -r -a words <<<"${SBATCH_ARGS:-}"
    sbatch+=(${words[@]+"${words[@]}"} "$ROOT/scripts/slurm_submit.sh" --job "$script" "$@")
    show_and_run "${sbatch[@]}"
    [ "$DRY_RUN" = 0 ] || job "$script" "$@"
}

# What Slurm runs on the first node.
job() {
    local script="$1" head=HEAD nodes="${NODES:-2}" port="${RAY_PORT:-6379}" status=0 joined=1 told run before
    if [ "$DRY_RUN" = 0 ]; then
        # whole, as a pipe that closes after the first line may end scontrol, and with it the job
        head="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
        head="${head%%$'\n'*}"
        nodes="$SLURM_JOB_NUM_NODES"
    fi
    export NODES="$nodes"
    export RUN_DIR="${RUN_DIR:-$WORK/runs/$(name_of "$@")-${SLURM_JOB_ID:-JOB}}"
    echo "start $((${SLURM_RESTART_COUNT:-0} + 1)) of job ${SLURM_JOB_ID:-JOB} on $nodes nodes; run: $RUN_DIR"
    told=none run="" before="$(checkpoints)"
    trap 'told=USR1; [ -z "$run" ] || kill -USR1 "$run" 2>/dev/null || true' USR1
    trap 'told=TERM; [ -z "$run" ] || kill -TERM "$run" 2>/dev/null || true' TERM
    [ "${SLURM_RESTART_COUNT:-0}$DRY_RUN" != 00 ] || rm -f "$RUN_DIR.no-checkpoint"
    # a node's one task is all of Ray there: it is not to be bound to a core
    local cluster=()
    in_background() { if [ "$DRY_RUN" = 1 ]; then show_and_run "$@"; else "$@" & cluster+=($!); fi; }
    in_background srun --nodes=1 --ntasks=1 --overlap --cpu-bind=none --export=ALL "--nodelist=$head" \
        env BLOCK=1 "RAY_PORT=$port" bash "$ROOT/scripts/ray_up.sh"
    if [ "$nodes" -gt 1 ]; then
        show_and_run env "HEAD=$head" WAIT_NODES=1 "RAY_PORT=$port" bash "$ROOT/scripts/ray_up.sh" || joined=0
        [ "$joined" = 0 ] || in_background srun "--nodes=$((nodes - 1))" "--ntasks=$((nodes - 1))" --overlap --cpu-bind=none --export=ALL "--exclude=$head" \
            env BLOCK=1 "HEAD=$head" "RAY_PORT=$port" bash "$ROOT/scripts/ray_up.sh"
    fi
    [ "$joined" = 0 ] || show_and_run env "HEAD=$head" "WAIT_NODES=$nodes" "RAY_PORT=$port" bash "$ROOT/scripts/ray_up.sh" || joined=0
    if [ "$DRY_RUN" = 1 ]; then
        RAY_ADDRESS="$head:$port" bash "$@"
        echo "# on USR1, $GRACE_S s before the limit: kill -USR1 RUN; the run ends with $TO_BE_CONTINUED"
        show_and_run scontrol requeue JOB
        return
    fi
    if [ "$joined$told" = 0none ]; then
        status=2
    elif [ "$told" = none ]; then # else the signal came while the nodes joined
        RAY_ADDRESS="$head:$port" bash "$@" &
        run=$!
        [ "$told" = none ] || kill -s "$told" "$run" 2>/dev/null || true # it came before the line above
        wait_for "$run"
    elif [ "$told" = USR1 ]; then
        status=138
    else
        status=143
    fi
    [ "${#cluster[@]}" = 0 ] || kill "${cluster[@]}" 2>/dev/null || true
    if [ "$joined$told" = 0none ]; then
        # a job that has run before was set up rightly, and a node was slow or ill
        { [ "$script" = "$RUN_RECIPE" ] && [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; } || exit "$status"
        again "the nodes did not join"
        return
    fi
    case "$told $status" in
    "USR1 $TO_BE_CONTINUED" | "USR1 143" | "USR1 138") # it saved; or was told to end before that; or had not begun
        again "out of time" ;;
    "TERM "* | *" 0" | *" 2" | *" 129" | *" 130" | *" 143") exit "$status" ;; # it is done, or refuses, or was ended by a user
    *" $TO_BE_CONTINUED") again "the run is to be continued" ;; # STOP_AFTER, or lost nodes or the cluster
    *)
        [ "$script" = "$RUN_RECIPE" ] || exit "$status" # what the code of another script means is not known
        again "the run ended with code $status" ;;
    esac
}

# The run's complete checkpoints.
checkpoints() {
    local path
    for path in "$RUN_DIR"/checkpoints/step_*; do
        case "${path##*/step_}" in *[!0-9]*) ;; *) echo "$path" ;; esac
    done
}

# Requeues the job. Argument: why. Another script may keep its run elsewhere, so only a recipe's checkpoints tell whether
# it gets on.
again() {
    if [ "$script" = "$RUN_RECIPE" ]; then
        if [ "$(checkpoints)" != "$before" ]; then
            rm -f "$RUN_DIR.no-checkpoint"
        elif [ -e "$RUN_DIR.no-checkpoint" ]; then
            echo "$1, but two starts in a row made no checkpoint: the job is not requeued"
            exit "$status"
        else
            mkdir -p "$(dirname "$RUN_DIR")"
            touch "$RUN_DIR.no-checkpoint"
        fi
    fi
    echo "$1: requeued; the job resumes from the newest checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
}

if [ "${1:-}" = --job ]; then
    shift
    job "$@"
else
    submit "$@"
fi
