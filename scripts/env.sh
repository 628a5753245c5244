# Sourced by quickstart.sh and test.sh: creates or reuses the Python environment.
#
# Defines ensure_env EXTRAS, which leaves the environment's interpreter in $PY.
#   PYTHON          the interpreter to make it with (default: python3); 3.11 or later
#   FP8_DIST_VENV   where it lives (default: .venv in the repository)

REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# ensure_env EXTRAS: installs the checkout, editable, with the named extras ("train,test") and the
# versions of constraints.txt. Does nothing when that has been done for the same pyproject.toml
# and constraints.txt.
ensure_env() {
    local extras="$1"
    local python="${PYTHON:-python3}"
    local venv="${FP8_DIST_VENV:-$REPO_ROOT/.venv}"
    PY="$venv/bin/python"
    if [ ! -x "$PY" ]; then
        if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "Python 3.11 or later is needed; '$python' is not (set PYTHON=...)" >&2
            return 1
        fi
        echo "== creating the environment $venv"
        "$python" -m venv "$venv" || return 1
    fi
    # The stamp says what was installed: a moved checkout, other pins or other extras install anew.
    local stamp="$venv/installed-${extras//,/-}" wanted
    wanted="$REPO_ROOT $(cat "$REPO_ROOT/pyproject.toml" "$REPO_ROOT/constraints.txt" | cksum)"
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
        echo "== installing fp8-dist[$extras]"
        "$PY" -m pip install --quiet --disable-pip-version-check \
            -c "$REPO_ROOT/constraints.txt" -e "$REPO_ROOT[$extras]" || return 1
        printf '%s' "$wanted" > "$stamp"
    fi
}
