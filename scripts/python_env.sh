# What setup_env.sh and setup_sglang.sh share: which Python, enough disk, and an environment no older than its sources.
# Sourced by them; does nothing by itself.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHONS="3.12 3.13 3.11" # in the order they are taken in: the newest megatron-core needs 3.12

fail() { printf 'error: %s\n  fix: %s\n' "$1" "$2" >&2; exit 2; }

# The arguments of a set-up script that is run by itself, not sourced: --help prints its first comment.
setup_arguments() {
    case "${1:-}" in
    '') ;;
    -h | --help) echo "usage: bash scripts/${0##*/}"; sed -n '2,/^[^#]/s/^# //p' "$0"; exit 0 ;;
    *) fail "${0##*/} takes no arguments, not '$1'" "bash scripts/${0##*/} --help" ;;
    esac
}

# The version of a Python, such as 3.12. Fails where it is none of PYTHONS.
version_of() {
    local version
    version="$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" || return
    [[ " $PYTHONS " == *" $version "* ]] && echo "$version"
}

can_make_environments() { "$1" -c 'import venv, ensurepip' 2>/dev/null; }

# Of an environment's Python, the one that it was made with: the environment may be the one that is made anew, and be
# active while it is.
base_of() { "$1" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)'; }

# Every Python of a version that may be here: on PATH, then pyenv's, the newest first. pyenv's shims on PATH answer only
# for versions that are selected.
pythons_of() {
    local folder folders=()
    command -v "python$1" || true
    folders=("${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/"$1".*/)
    for ((folder = ${#folders[@]} - 1; folder >= 0; folder--)); do
        [ ! -x "${folders[folder]}bin/python$1" ] || echo "${folders[folder]}bin/python$1"
    done
}

# The Python that environments are made with, and in a second line why it is that one: that of the variable named here,
# or the first of PYTHONS that can make environments.
find_python() {
    local variable="$1" version candidate bare=
    if [ -n "${!variable:-}" ]; then
        candidate="$(command -v "${!variable}")" || fail "$variable=${!variable} is no command" "set $variable to a Python of ${PYTHONS// /, }"
        version="$(version_of "$candidate")" ||
            fail "$variable=${!variable} says: $("$candidate" --version 2>&1)" "name one of ${PYTHONS// /, }"
        candidate="$(base_of "$candidate")"
        can_make_environments "$candidate" || fail "$candidate has no venv module" "install python3-venv"
        printf '%s\nwhich %s names\n' "$candidate" "$variable"
        return
    fi
    for version in $PYTHONS; do
        while read -r candidate; do
            [ "$(version_of "$candidate")" = "$version" ] || continue
            candidate="$(base_of "$candidate")"
            if can_make_environments "$candidate"; then
                printf '%s\nthe first one found of %s\n' "$candidate" "${PYTHONS// /, }"
                return
            fi
            bare="$candidate"
        done < <(pythons_of "$version")
    done
    candidate="$(command -v python3)" || candidate=
    if [ -n "$candidate" ] && version="$(version_of "$candidate")"; then
        candidate="$(base_of "$candidate")"
        if can_make_environments "$candidate"; then
            printf '%s\nthe only one found\n' "$candidate"
            return
        fi
        bare="$candidate"
    fi
    [ -z "$bare" ] || fail "$bare has no venv module" "install python3-venv"
    fail "no Python 3.11 to 3.13 found (python3 is $(python3 --version 2>/dev/null || echo missing))" \
        "install one, or name it: $variable=/path/to/python3.12"
}

# An empty environment in a folder, from a Python, if its disk has room. Until it is built its stamp says `building`.
new_env() {
    local venv="$1" python="$2" why="$3" needed_mb="$4" free_mb each
    free_mb="$(df -Pm "$ROOT" | awk 'NR == 2 {print $4}')"
    [ "$free_mb" -ge "$needed_mb" ] ||
        fail "only $free_mb MB free on the disk of $ROOT, $venv needs $needed_mb" "free some space"
    echo "setting up $venv with $("$python" --version) of $python, $why (a few minutes, once)"
    [ ! -L "$venv" ] || rm "$venv" # the folder that a link leads to stays
    mkdir -p "$venv"
    echo building >"$venv/.stamp" # before anything is removed: an interrupted build is begun anew
    for each in "$venv"/* "$venv"/.[!.]*; do
        [ "$each" = "$venv/.stamp" ] || rm -rf "$each"
    done
    "$python" -m venv "$venv"
}

# pip of an environment, quiet.
pip_install() {
    local venv="$1"
    shift
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

# The project with its pins, editable.
install_project() {
    local venv="$1"
    pip_install "$venv" -c "$ROOT/constraints.txt" setuptools wheel
    # torch first and alone: where a CPU build of this version is at hand, pip takes it
    pip_install "$venv" -c "$ROOT/constraints.txt" torch==2.13.0
    pip_install "$venv" -c "$ROOT/constraints.txt" --no-build-isolation -e "${ROOT}[dev]"
}

# SGLang as its lock has it, then the packages named here without what they ask for, and this project, through which the
# entry point of the platform plug-in is found.
install_sglang() {
    local venv="$1"
    shift
    # with what its build asks for: one with CUDA does not load without CUDA's libraries
    pip_install "$venv" torch==2.13.0
    pip_install "$venv" --no-deps -r "$ROOT/scripts/sglang-cpu.lock"
    [ $# -eq 0 ] || pip_install "$venv" --no-deps "$@"
    pip_install "$venv" --no-deps --no-build-isolation -e "$ROOT"
}

# Where the environment of a Python belongs: in the folder given, or, beside one there of another version, in a folder
# of its own, such as .venv-3.11. Without a Python of the user's own it is the folder given.
env_folder() {
    local venv="$1" variable="$2" version there
    if [ -n "${!variable:-}" ] && [ -x "$venv/bin/python" ]; then
        version="$(version_of "${!variable}")" || version=
        there="$(version_of "$venv/bin/python")" || there="$version"
        [ "$version" = "$there" ] || venv="$venv-$version"
    fi
    echo "$venv"
}

# Calls a function that builds an environment, unless it was built from these files as they are, here, with its Python,
# which must still run and be of the version that the variable named here asks for. Fails for a folder without a stamp,
# such as an environment that was made by hand.
build_if_changed() {
    local venv="$1" variable="$2" build="$3" stamp version asked
    shift 3
    stamp="$(cat "$@" "$ROOT/pyproject.toml" "$ROOT/scripts/python_env.sh" | sha256sum | cut -d' ' -f1) $ROOT"
    version="$(version_of "$venv/bin/python")" || version=missing
    asked="$version"
    [ -z "${!variable:-}" ] || asked="$(version_of "${!variable}")" || asked=unknown
    if [ "$asked" = "$version" ] &&
        [ "$(cat "$venv/.stamp" 2>/dev/null)" = "$stamp $("$venv/bin/python" --version 2>/dev/null)" ]; then
        return
    fi
    [ ! -e "$venv" ] || [ -e "$venv/.stamp" ] ||
        fail "$venv was not made by this script, which would build it anew" "use it without this script, or remove it"
    "$build" "$venv"
    echo "$stamp $("$venv/bin/python" --version)" >"$venv/.stamp"
}
