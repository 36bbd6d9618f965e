#!/usr/bin/env bash
# Ends Ray on this node, or on several by ssh, with all that runs on it: every Ray of this user there, not of one cluster.
# Where a ray_up.sh stays (BLOCK=1), end that instead: it may start Ray again.
#   bash scripts/ray_down.sh
#   HOSTS="node1 node2" bash scripts/ray_down.sh
#   HOSTS       nodes to be reached by ssh; empty: this node alone
#   SSH         how they are reached (ssh -o BatchMode=yes)
#   GRACE_S     seconds that processes have to end before they are killed (16)
#   PYTHON      of this project's environment (.venv/bin/python of this project)
#   DRY_RUN     1: prints the commands alone (0)
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
