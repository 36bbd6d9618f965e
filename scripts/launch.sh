# shellcheck shell=bash
# Turns variables into the command line of one run. Sourced by run_recipe.sh and others; does nothing by itself.
#
# What to train. All nodes must see the folder WORK.
#   RECIPE            the first argument: a name that `megatron-stare recipes` lists; the former variable ALGORITHM
#                     is refused
#   WORK              folder to which the recipe's paths are relative: models/, data/ and runs/ (the current folder)
#   MODEL             Hugging Face folder, or what convert_hf.sh wrote (the recipe's: models/NAME)
#   DATA              training problems, see docs/data.md (the recipe's: data/dapo_math_17k.jsonl)
#   STEPS             rollout batches (the recipe's)
#   SEED              seed of data order and sampling (1)
#   EVALUATE          0 leaves the recipe's evaluation out (1)
# The layout. A variable that is empty has the recipe's value.
#   NODES             nodes with GPUS_PER_NODE (8) GPUs each; DATA_PARALLEL and, if colocated, ENGINES are adapted to
#                     NODES, unless DATA_PARALLEL or ENGINES is given
#   TENSOR PIPELINE CONTEXT DATA_PARALLEL    ranks of the trainer in each direction
#   ENGINES ENGINE_TENSOR                    servers, and the GPUs of each
#   COLOCATED                                true: servers are on the trainer's GPUs; false: on others
#   DTYPE             dtype of the model: float16, bfloat16 or float32
#   PROMPTS           prompt groups of a step; GENERATE_PROMPTS: of a round of dynamic sampling
#   SAMPLES           responses of a prompt
#   MINI_BATCH        prompt groups of an optimizer step
#   MAX_PROMPT_TOKENS MAX_NEW_TOKENS MICRO_BATCH_TOKENS    lengths
#   DEVICE_GB         memory of a GPU that the run is checked against, 10^9 bytes; null: no check
# Where it runs.
#   RAY_ADDRESS       host:port of the Ray cluster to join; empty: one is started on this machine
#   ENGINE            sglang, or local: the engine in process, for tiny models on CPUs (sglang)
#   SGLANG_PYTHON     Python of SGLang's environment (.venv-sglang/bin/python of this project)
#   DEVICE            cuda or cpu: where servers compute (cuda)
#   GPU_RESOURCE      Ray resource that ranks are placed by (GPU)
#   INTERFACE         network interface of every node, such as eth0 (any)
#   PORTS             first and last port of a run, such as 30000-30099 (any)
# The run itself.
#   RUN_DIR           run directory (WORK/runs/RECIPE)
#   RESUME            auto: resumes the run in RUN_DIR, or starts one; 0: starts one; 1: resumes (auto)
#   STOP_AFTER        time limit, such as 3h50m: before it, the run saves and ends with exit code 75 (none)
#   SETTINGS          further key=value settings, as for `megatron-stare train`, like the script's own arguments
#   PYTHON            Python of this project's environment (.venv/bin/python of this project)
#   DRY_RUN           1: prints all commands and the resolved configuration, and starts nothing (0)

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() { printf 'error: %s\n  fix: %s\n' "$1" "$2" >&2; exit 2; }

# The comment at the top of a script, without its marks.
usage_of() { sed -n '2,/^[^#]/ { /^#/ { /shellcheck/d; s/^# \{0,1\}//; p } }' "$1"; }

# Of a script that takes variables alone: its arguments can but ask for help.
variables_alone() {
    case "${1:-}" in
    -h | --help) usage_of "$0"; exit 0 ;;
    ?*) fail "unknown argument $1" "set variables instead; --help lists them" ;;
    esac
}

# A variable that is to be one of some words.
one_of() {
    local name="$1" value="${!1}" word
    shift
    for word in "$@"; do
        [ "$value" != "$word" ] || return 0
    done
    fail "$name is $value" "one of: $*"
}

# A command as the shell would take it; then, but for a dry run, runs it.
show_and_run() {
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    [ "${DRY_RUN:-0}" = 1 ] || "$@"
}

# Waits for a process of this script to end, which a signal that the script traps does not shorten; leaves its exit
# code in `status`.
wait_for() {
    while true; do
        # shellcheck disable=SC2034 # the callers read it
        wait "$1" && status=0 || status=$?
        kill -0 "$1" 2>/dev/null || break
    done
    # a signal may have ended the wait just as the process ended; bash still has its code
    local code=0
    [ "$status" -le 128 ] || wait "$1" 2>/dev/null || code=$?
    [ "$status" -le 128 ] || [ "$code" = 127 ] || status=$code
}

# The IPv4 address of a node by its name, as this machine's resolver finds it: gRPC, by which Ray speaks, asks DNS
# servers, and may not look into /etc/hosts. The name itself where only loopback addresses are known.
address_of() {
    local found
    found="$(getent ahostsv4 "$1" 2>/dev/null | awk '$1 !~ /^127[.]/ { print $1; exit }')" || true
    echo "${found:-$1}"
}

# Leaves $PYTHON, which must be there.
find_project_python() {
    PYTHON="${PYTHON:-$ROOT/.venv/bin/python}"
    command -v "$PYTHON" >/dev/null 2>&1 ||
        fail "there is no Python at $PYTHON" "run bash scripts/setup_env.sh, or set PYTHON to another Python"
    PYTHON="$(command -v "$PYTHON")" # whole, as it is called in other folders and on other nodes
    case "$PYTHON" in /*) ;; *) PYTHON="$PWD/$PYTHON" ;; esac
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
}

# Appends to `settings`: a key, and the variable that sets it where it is not empty.
setting() {
    local key="$1" value="${!2:-}"
    [ -z "$value" ] || settings+=("$key=$value")
}

# Appends to `settings` what the variables say.
settings_of_variables() {
    one_of ENGINE sglang local
    one_of DEVICE cuda cpu
    [ "$ENGINE" = sglang ] || settings+=(
        "rollout.engine=$ENGINE" sglang.colocated=false sglang.device=auto sglang.memory_fraction=null
        sglang.tensor_parallel=1 sglang.start_timeout_s=300
    )
    if [ "$ENGINE" = sglang ] && [ "$DEVICE" = cpu ]; then settings+=(sglang.device=cpu); fi
    if [ "$DEVICE" = cpu ]; then settings+=(memory.device_gb=null sglang.memory_fraction=null plan.gpu=cpu-core); fi
    setting model.path MODEL
    setting data.path DATA
    setting run.steps STEPS
    setting run.seed SEED
    setting parallel.tensor TENSOR
    setting parallel.pipeline PIPELINE
    setting parallel.context CONTEXT
    setting parallel.data DATA_PARALLEL
    [ "${TENSOR:-}" != 1 ] || settings+=(parallel.sequence=false)
    setting rollout.engines ENGINES
    setting sglang.tensor_parallel ENGINE_TENSOR
    setting sglang.colocated COLOCATED
    setting model.dtype DTYPE
    setting batch.prompts PROMPTS
    setting batch.generate_prompts GENERATE_PROMPTS
    setting batch.samples_per_prompt SAMPLES
    setting batch.mini_batch_prompts MINI_BATCH
    setting rollout.max_prompt_tokens MAX_PROMPT_TOKENS
    setting rollout.max_new_tokens MAX_NEW_TOKENS
    setting batch.micro_batch_tokens MICRO_BATCH_TOKENS
    setting memory.device_gb DEVICE_GB
    setting sglang.python SGLANG_PYTHON
    setting runtime.gpu_resource GPU_RESOURCE
    setting runtime.interface INTERFACE
    [ -z "${PORTS:-}" ] || settings+=("runtime.ports=[${PORTS/-/, }]")
    one_of EVALUATE 0 1
    [ "$EVALUATE" = 1 ] || settings+=('eval.tasks=[]' 'data.decontaminate=[]')
}

# Whether the run is on GPUs of nodes that a plan can be made for.
on_gpus() { [ "$ENGINE" = sglang ] && [ "$DEVICE" = cuda ] && [ "${GPUS_PER_NODE:-8}" != 0 ]; }

# Whether the layout is given, by a variable or among the key=value words that are the arguments.
layout_is_given() {
    [ -z "${DATA_PARALLEL:-}${ENGINES:-}" ] || return 0
    case " $* " in *" parallel.data="* | *" rollout.engines="*) return 0 ;; esac
    return 1
}

# Asks `megatron-stare plan` for a recipe with `settings`, over NODES unless the layout is given. Leaves planned_nodes,
# planned_grace_s and planned_layout. Arguments: the recipe.
plan_of() {
    local planned name value over=(--gpus-per-node "${GPUS_PER_NODE:-8}")
    [ -z "${NODES:-}" ] || layout_is_given "${settings[@]}" || over+=(--nodes "$NODES")
    planned="$("$PYTHON" -m megatron_stare.cli plan "recipes/$1" "${settings[@]}" "${over[@]}" --launch)" || exit 2
    # shellcheck disable=SC2034 # slurm_submit.sh reads them
    planned_nodes="" planned_grace_s="" planned_layout=()
    while read -r name value; do
        case "$name" in
        nodes | grace_s) printf -v "planned_$name" %s "$value" ;;
        layout) planned_layout+=("$value") ;;
        esac
    done <<<"$planned"
}

# Checks the recipe and the variables, and leaves them in `settings`. Arguments: the recipe, key=value words.
settings_of_recipe() {
    local recipe="${1:-}" words word
    case "$recipe" in
    "" | *=*) fail "no recipe is named" "run_recipe.sh short_cot_qwen2.5_math_7b; megatron-stare recipes lists them" ;;
    esac
    [ -z "${ALGORITHM:-}" ] ||
        fail "ALGORITHM=$ALGORITHM has no effect: a recipe sets its method" "name another recipe, such as ${recipe}_$ALGORITHM"
    for word in "$@"; do
        case "$word" in
        -*) fail "unknown option $word" "set variables or key=value words instead; --help lists them" ;;
        esac
    done
    shift
    ENGINE="${ENGINE:-sglang}" DEVICE="${DEVICE:-cuda}" EVALUATE="${EVALUATE:-1}"
    find_project_python
    settings=()
    settings_of_variables
    read -r -a words <<<"${SETTINGS:-}"
    settings+=(${words[@]+"${words[@]}"} "$@")
}

# Trains. Arguments: the recipe, key=value words.
launch() {
    # a driver that is killed, by Ray or for memory, is started again
    local recipe="${1:-}" settings options=(--supervise)
    case "$recipe" in
    -h | --help)
        usage_of "$0"
        usage_of "${BASH_SOURCE[0]}"
        exit 0
        ;;
    esac
    RESUME="${RESUME:-auto}" DRY_RUN="${DRY_RUN:-0}"
    one_of DRY_RUN 0 1
    one_of RESUME auto 0 1
    settings_of_recipe "$@"
    WORK="${WORK:-$PWD}"
    cd "$WORK" 2>/dev/null || fail "there is no folder $WORK" "set WORK to a folder that all nodes see"
    RUN_DIR="${RUN_DIR:-$PWD/runs/$recipe}"
    if [ -n "${NODES:-}" ] && on_gpus && ! layout_is_given "${settings[@]}"; then
        plan_of "$recipe"
        settings+=(${planned_layout[@]+"${planned_layout[@]}"})
    fi
    settings=("run.dir=$RUN_DIR" "${settings[@]}")
    if [ "$RESUME" = 1 ] || { [ "$RESUME" = auto ] && [ -e "$RUN_DIR/config.yaml" ]; }; then options+=(--resume); fi
    if [ -n "${STOP_AFTER:-}" ]; then options+=(--stop-after "$STOP_AFTER"); fi
    local train=("$PYTHON" -m megatron_stare.cli train "recipes/$recipe")
    local joins=(${RAY_ADDRESS:+"runtime.ray_address=$RAY_ADDRESS"})
    if [ "$DRY_RUN" = 1 ]; then
        # what the run would be started with, and then the check of it, which asks no cluster
        show_and_run "${train[@]}" "${settings[@]}" ${joins[@]+"${joins[@]}"} "${options[@]}"
        exec "${train[@]}" "${settings[@]}" "${options[@]}" --dry-run
    fi
    unset RAY_ADDRESS # Ray reads it, too, wherever it starts
    exec "${train[@]}" "${settings[@]}" ${joins[@]+"${joins[@]}"} "${options[@]}"
}
