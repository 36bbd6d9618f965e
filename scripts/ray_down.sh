#!/usr/bin/env bash
# Ends every Ray of this user on this node, or on several nodes by ssh, and all processes that run on it.
# If a ray_up.sh with BLOCK=1 is running, end that script instead: it may start Ray again.
#   bash scripts/ray_down.sh
#   HOSTS="node1 node2" bash scripts/ray_down.sh
#   HOSTS       nodes to reach by ssh; empty: only this node
#   SSH         command that reaches them (ssh -o BatchMode=yes)
#   GRACE_S     seconds that processes have to end before they are killed (16)
#   PYTHON      Python of this project's environment (.venv/bin/python of this project)
#   DRY_RUN     1: only prints the commands (0)
set -euo pipefail
# shellcheck source=scripts/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
variables_alone "$@"
DRY_RUN="${DRY_RUN:-0}"
one_of DRY_RUN 0 1
find_project_python
stop=("$PYTHON" -m ray.scripts.scripts stop --grace-period "${GRACE_S:-16}")
if [ -z "${HOSTS:-}" ]; then
    show_and_run "${stop[@]}"
    exit 0
fi
read -r -a hosts <<<"$HOSTS"
read -r -a ssh <<<"${SSH:-ssh -o BatchMode=yes}"
left=()
for host in "${hosts[@]}"; do # one that is gone does not keep the others up
    show_and_run "${ssh[@]}" "$host" "$(printf '%q ' "${stop[@]}")" || left+=("$host")
done
[ "${#left[@]}" = 0 ] || fail "Ray could not be stopped on ${left[*]}" "check that ${SSH:-ssh -o BatchMode=yes} reaches these hosts"
