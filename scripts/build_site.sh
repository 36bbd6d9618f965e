#!/usr/bin/env bash
# Builds the site of docs/ in build/site, in an environment of its own, .venv-docs (150 MB).
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: bash scripts/build_site.sh [--serve]

  (none)   builds build/site/index.html; a broken link or a page outside the navigation is an error, and so is a page
           that loads anything from another host
  --serve  shows the site on a port of this machine and builds it anew when a page changes
TEXT
}

case "${1:-}" in
-h | --help) usage; exit 0 ;;
"" | --serve) ;;
*) usage >&2; exit 2 ;;
esac

source "$(dirname "${BASH_SOURCE[0]}")/python_env.sh"

build_docs_env() {
    local venv="$1" found
    found="$(find_python DOCS_PYTHON)"
    new_env "$venv" "${found%%$'\n'*}" "${found##*$'\n'}" 200
    pip_install "$venv" -r "$ROOT/docs/requirements.txt"
}

VENV="$ROOT/.venv-docs"
build_if_changed "$VENV" DOCS_PYTHON build_docs_env "$ROOT/docs/requirements.txt" "$ROOT/scripts/build_site.sh"
cd "$ROOT"
export NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true # an advertisement of the theme's authors
[ "${1:-}" != --serve ] || exec "$VENV/bin/python" -m mkdocs serve
"$VENV/bin/python" -m mkdocs build --strict --site-dir build/site
loaded='<(script|img|iframe|source|link[^>]* rel="?(stylesheet|preload|preconnect|icon))[^>]* (src|href)="?(https?:)?//'
loaded+='|url\(["'"'"']?(https?:)?//|@import +["'"'"'](https?:)?//'
if grep -rEno "($loaded)[^\"' >]*" build/site --include='*.html' --include='*.css'; then
    fail "the site loads what is named above from another host" "take it out of mkdocs.yml or docs/"
fi
echo "site: build/site/index.html"
