#!/usr/bin/env bash
# Starts Ray on this node, or on several by ssh, for runs that join it: RAY_ADDRESS=HEAD:RAY_PORT.
#   bash scripts/ray_up.sh                            this node is the head
#   HEAD=10.0.0.1 bash scripts/ray_up.sh              this node joins that head
#   HOSTS="node1 node2" bash scripts/ray_up.sh        starts these by ssh, the first as head; ray_down.sh ends them
#   HEAD        address of the head's node; empty: this node is the head
#   HOSTS       nodes to reach by ssh, with this project at the same path; empty: only this node
#   SSH         command that reaches them (ssh -o BatchMode=yes)
#   NODE_IP     address of this node by which the others reach it (Ray's choice)
#   RAY_PORT    port of the head (6379)
#   RAY_TMP     short, local folder for Ray's sockets and logs; the head sets it for all nodes (/tmp/ray-USER_ID/ray:
#               with /tmp/ray, no other user of a node could start Ray, and everybody could write into the folder)
#   GPUS CPUS   numbers that Ray may use on this node (all)
#   RESOURCES   further resources as JSON, such as {"fake_gpu": 1}
#   OBJECT_STORE_GB    shared memory of this node for objects, 10^9 bytes (Ray's: 30 % of memory)
#   BLOCK       1: runs until it is told to end, and starts Ray again if Ray dies; for srun and containers (0)
#   LASTED_S    seconds that Ray must have run before BLOCK=1 starts it again (60)
#   WAIT_NODES  number of nodes: starts nothing, but waits until so many nodes have joined the head (0: starts Ray)
#   WAIT_S      time limit of this wait, seconds (300)
#   PYTHON      Python of this project's environment (.venv/bin/python of this project)
#   DRY_RUN     1: only prints the commands (0)
# Whoever can reach the head's port can run code on every node: keep the port inside the cluster, or set Ray's variables
# RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the same values on all nodes and for the run.
set -euo pipefail
# shellcheck source=scripts/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
variables_alone "$@"
DRY_RUN="${DRY_RUN:-0}" BLOCK="${BLOCK:-0}" RAY_PORT="${RAY_PORT:-6379}" WAIT_NODES="${WAIT_NODES:-0}"
one_of DRY_RUN 0 1
one_of BLOCK 0 1
RAY_TMP="${RAY_TMP:-${RAY_TMPDIR:+$RAY_TMPDIR/ray}}" # RAY_TMPDIR is Ray's own variable
private="/tmp/ray-$(id -u)"
find_project_python
ray=("$PYTHON" -m ray.scripts.scripts)
# Once Ray has run on this machine alone, ~/.ray has a token. A head would then ask for it, and no node would give it.
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-disabled}"

if [ "$WAIT_NODES" != 0 ]; then
    count="import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')
print(sum(node['Alive'] for node in ray.nodes()))"
    deadline=$((SECONDS + ${WAIT_S:-300}))
    [ "$DRY_RUN" = 0 ] || { echo "+ # waits until $WAIT_NODES nodes have joined ${HEAD:-this node}:$RAY_PORT"; exit 0; }
    joined=0
    until joined="$("$PYTHON" -c "$count" "$(address_of "${HEAD:-127.0.0.1}"):$RAY_PORT" 2>/dev/null)" && [ "$joined" -ge "$WAIT_NODES" ]; do
        [ "$SECONDS" -lt "$deadline" ] ||
            fail "${joined:-0} of $WAIT_NODES nodes have joined ${HEAD:-this node}:$RAY_PORT in ${WAIT_S:-300} s" \
                "look at the nodes' logs in ${RAY_TMP:-$private/ray}/session_latest/logs, and check that the port is open between them"
        sleep 2
    done
    exit 0
fi

if [ -n "${HOSTS:-}" ]; then
    read -r -a hosts <<<"$HOSTS"
    read -r -a ssh <<<"${SSH:-ssh -o BatchMode=yes}"
    first="${hosts[0]}"
    for host in "${hosts[@]}"; do
        there=("PYTHON=$PYTHON" "RAY_PORT=$RAY_PORT")
        [ "$host" = "$first" ] || there+=("HEAD=${HEAD:-$first}")
        for name in RAY_TMP GPUS CPUS RESOURCES OBJECT_STORE_GB RAY_AUTH_MODE RAY_AUTH_TOKEN_PATH; do
            [ -z "${!name:-}" ] || there+=("$name=${!name}")
        done
        show_and_run "${ssh[@]}" "$host" "$(printf '%q ' env "${there[@]}" bash "$ROOT/scripts/ray_up.sh")"
    done
    echo "RAY_ADDRESS=${HEAD:-$first}:$RAY_PORT"
    exit 0
fi

# a server on its trainer's GPUs asks Ray for none, and is to see those that it is shown
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
# otherwise Ray's control store records the last 100,000 calls and grows for days
export RAY_task_events_report_interval_ms=0
start=("${ray[@]}" start --disable-usage-stats)
if [ -n "${HEAD:-}" ]; then
    start+=("--address=$(address_of "$HEAD"):$RAY_PORT")
else
    start+=(--head "--port=$RAY_PORT" --include-dashboard=false)
    start+=("--temp-dir=${RAY_TMP:-$private/ray}")
fi
[ -z "${NODE_IP:-}" ] || start+=("--node-ip-address=$NODE_IP")
[ -z "${GPUS:-}" ] || start+=("--num-gpus=$GPUS")
[ -z "${CPUS:-}" ] || start+=("--num-cpus=$CPUS")
[ -z "${RESOURCES:-}" ] || start+=("--resources=$RESOURCES")
[ -z "${OBJECT_STORE_GB:-}" ] || start+=("--object-store-memory=$((OBJECT_STORE_GB * 1000000000))")
[ "$BLOCK" = 0 ] || start+=(--block)
if [ "$DRY_RUN" = 0 ] && [ -z "$RAY_TMP" ]; then
    mkdir -m 700 "$private" 2>/dev/null || true
    { [ -d "$private" ] && [ -O "$private" ] && [ ! -L "$private" ]; } ||
        fail "$private is not a folder of your own" "set RAY_TMP to a short, local folder that only you can write to"
    chmod 700 "$private"
fi
if [ "$BLOCK" = 0 ] || [ "$DRY_RUN" = 1 ]; then
    show_and_run "${start[@]}"
    exit 0
fi
told="" running=""
trap 'told=1; [ -z "$running" ] || kill -TERM "$running" 2>/dev/null || true' TERM INT HUP QUIT
while [ -z "$told" ]; do
    began=$SECONDS
    "${start[@]}" &
    running=$!
    [ -z "$told" ] || kill -TERM "$running" 2>/dev/null || true # it came before the line above
    wait_for "$running"
    running=""
    # 1: one of its processes died. A Ray that does not last a minute would not last the next time either.
    { [ "$status" = 1 ] && [ $((SECONDS - began)) -ge "${LASTED_S:-60}" ]; } || exit "$status"
    [ -n "$told" ] || echo "a process of Ray died on $(hostname): Ray starts again" >&2
done
exit "$status"
