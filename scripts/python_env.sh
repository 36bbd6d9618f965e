# What setup_env.sh and setup_sglang.sh share: which Python, enough disk, and an environment no older than its sources.
# Sourced by them; does nothing by itself.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() { printf 'error: %s\n  fix: %s\n' "$1" "$2" >&2; exit 2; }

# The first of some Pythons that is 3.10 to 3.12 and can make environments. The first argument is the variable that names one of the user's own.
find_python() {
    local variable="$1" candidate bare=
    shift
    for candidate in ${!variable:-} "$@" python3; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            if "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
                command -v "$candidate"
                return
            fi
            bare="$(command -v "$candidate")"
        fi
    done
    [ -z "$bare" ] || fail "$bare has no venv module" "install python3-venv"
    fail "no Python 3.10 to 3.12 found (python3 is $(python3 --version 2>/dev/null || echo missing))" \
        "install one, or name it: $variable=/path/to/python3.11"
}

# An empty environment in a folder, from a Python, if its disk has room.
new_env() {
    local venv="$1" python="$2" needed_mb="$3" free_mb
    free_mb="$(df -Pm "$ROOT" | awk 'NR == 2 {print $4}')"
    [ "$free_mb" -ge "$needed_mb" ] ||
        fail "only $free_mb MB free on the disk of $ROOT, $venv needs $needed_mb" "free some space"
    echo "setting up $venv with $("$python" --version) (a few minutes, once)"
    rm -rf "$venv"
    "$python" -m venv "$venv"
}

# pip of an environment, quiet.
pip_install() {
    local venv="$1"
    shift
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

# Calls a function that builds an environment, unless it was built from these files as they are, here.
build_if_changed() {
    local venv="$1" build="$2" stamp
    shift 2
    stamp="$(cat "$@" "$ROOT/pyproject.toml" "$ROOT/scripts/python_env.sh" | sha256sum | cut -d' ' -f1) $ROOT"
    [ "$(cat "$venv/.stamp" 2>/dev/null)" = "$stamp" ] && return
    "$build"
    echo "$stamp" >"$venv/.stamp"
}
