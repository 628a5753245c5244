# Sourced by quickstart.sh, test.sh and others, before they change the folder: creates or reuses the
# Python environment.
#
# Defines REPO_ROOT, and ensure_env EXTRAS, which leaves the environment's interpreter in $PY.
#   PYTHON          the interpreter to make it with (default: python3); 3.11 or later
#   FP8_DIST_VENV   where it lives (default: .venv in the repository)
#   FP8_DIST_TORCH  another release of torch than that of constraints.txt, such as 2.11.0

# With CDPATH set, cd prints where it went, or goes elsewhere.
unset CDPATH
REPO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# absolute PATH: prints it as it reads from the current folder.
absolute() {
    case "$1" in
        /*) printf '%s' "$1" ;;
        *) printf '%s' "$PWD/$1" ;;
    esac
}

FP8_DIST_VENV="$(absolute "${FP8_DIST_VENV:-$REPO_ROOT/.venv}")"
case "${PYTHON:=python3}" in
    */*) PYTHON="$(absolute "$PYTHON")" ;;  # a bare name is looked up in PATH
esac

# constraints: the exact versions to install.
constraints() {
    local edits=(-e "")
    if [ -n "${FP8_DIST_TORCH:-}" ]; then
        # A release of torch asks for its own triton, and may limit setuptools.
        edits+=(-e "s/^torch==.*/torch==$FP8_DIST_TORCH/" -e "/^setuptools==/d" -e "/^triton==/d")
        # The interpreter of its Triton (3.6) fails with NumPy 2.4.
        case "$FP8_DIST_TORCH" in 2.11.*) edits+=(-e "s/^numpy==.*/numpy<2.4/") ;; esac
    fi
    sed "${edits[@]}" "$REPO_ROOT/constraints.txt"
}

# other_releases: what is installed in other releases than those of constraints.txt, on one line.
other_releases() {
    "$PY" -P -m pip list --format=freeze --disable-pip-version-check |
        awk -F== 'NR == FNR { if (NF == 2) pinned[tolower($1)] = $2; next }
            { name = tolower($1); sub(/[+].*/, "", $2) }
            name in pinned && $2 != pinned[name] { printf " %s %s (not %s)", $1, $2, pinned[name] }
        ' "$REPO_ROOT/constraints.txt" -
}

# ensure_env EXTRAS: installs the checkout, editable, with the named extras ("train,test") and the
# versions of constraints.txt. Does nothing when that has been done for the same pyproject.toml
# and constraints.
ensure_env() {
    local extras="$1"
    PY="$FP8_DIST_VENV/bin/python"
    # -P everywhere: what lies in the current folder must not hide an installed module.
    if ! "$PY" -P -m pip --version > /dev/null 2>&1; then
        create_env || return 1
    fi
    # The stamp says what was installed: a moved checkout, other pins or other extras install anew.
    local stamp="$FP8_DIST_VENV/installed-${extras//,/-}" wanted
    wanted="$REPO_ROOT $({ cat "$REPO_ROOT/pyproject.toml"; constraints; } | cksum)"
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
        echo "== installing fp8-dist[$extras]${FP8_DIST_TORCH:+ with torch $FP8_DIST_TORCH}"
        # The package is built with the environment's own setuptools, so that it is pinned too:
        # whether constraints reach isolated builds depends on pip's version.
        local backend
        backend="$(sed -n 's/^requires = \["\(.*\)"\]$/\1/p' "$REPO_ROOT/pyproject.toml")"
        pip_install "$backend" || return 1
        pip_install --no-build-isolation -e "$REPO_ROOT[$extras]" || return 1
        printf '%s' "$wanted" > "$stamp"
        [ -z "${FP8_DIST_TORCH:-}" ] || echo "== other releases than CI's:$(other_releases)"
    fi
}

# pip_install ARGUMENTS: installs the exact versions of constraints.txt. What pip prints is shown if
# it fails. Nothing is compiled: Python does that with the few modules that it imports.
pip_install() {
    constraints > "$FP8_DIST_VENV/constraints.txt"
    local log="$FP8_DIST_VENV/pip.log"
    "$PY" -P -m pip install --no-compile --progress-bar off --disable-pip-version-check \
        -c "$FP8_DIST_VENV/constraints.txt" "$@" 2>&1 | tee "$log" | last_line 20
    if [ "${PIPESTATUS[0]}" -ne 0 ]; then
        cat "$log" >&2
        return 1
    fi
}

# last_line SECONDS: shows the last line that it has read, and for how long it has read: on a
# terminal always, as one line that changes, and otherwise every so many seconds.
last_line() {
    local line last="" begin=$SECONDS shown=$SECONDS every="$1" before="   " after="\n" status
    if [ -t 1 ]; then
        every=1 before="\r\033[K   " after=""
    fi
    while true; do
        status=0
        IFS= read -r -t "$every" line || status=$?
        if [ "$status" -eq 0 ]; then
            last="$line"
        elif [ "$status" -le 128 ]; then
            break  # the end of the input; above 128 the time was over
        fi
        if [ $((SECONDS - shown)) -ge "$every" ]; then
            printf "$before%s s: %.66s$after" $((SECONDS - begin)) "${last#"${last%%[! ]*}"}"
            shown=$SECONDS
        fi
    done
    [ ! -t 1 ] || printf '\r\033[K'
}

# create_env: makes the environment, also in place of one that has no working pip: its creation was
# interrupted, or its interpreter is gone.
create_env() {
    if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "Python 3.11 or later is needed; '$PYTHON' is not (set PYTHON=...)" >&2
        return 1
    fi
    if [ -n "$(ls -A "$FP8_DIST_VENV" 2> /dev/null)" ] && [ ! -f "$FP8_DIST_VENV/pyvenv.cfg" ]; then
        echo "$FP8_DIST_VENV holds something else than a Python environment: remove it, or set" \
            "FP8_DIST_VENV=..." >&2
        return 1
    fi
    echo "== creating the environment $FP8_DIST_VENV"
    if ! "$PYTHON" -m venv --clear "$FP8_DIST_VENV"; then
        echo "the environment could not be created with '$PYTHON'; on Debian and Ubuntu it needs" \
            "a package: apt install python3-venv" >&2
        return 1
    fi
}
