#!/usr/bin/env bash
# Creates the environment (or reuses it) and builds the site of the documentation:
#   bash scripts/docs.sh             in build/site
#   bash scripts/docs.sh FOLDER      there
set -u
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$REPO_ROOT" || exit 1
ensure_env "docs" || exit 1
exec "$PY" -m scripts.site "$@"
