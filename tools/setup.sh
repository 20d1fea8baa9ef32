#!/bin/sh
# Finds a Python that the pinned packages support and hands over to setup.py. Needs nothing but a POSIX shell.
# Usage: tools/setup.sh VENV [cpu|cuda]      PYTHON=/path/to/python overrides the search.
set -eu

supported() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 11))' 2>/dev/null
}

here=${0%/*}
found=""
for candidate in ${PYTHON:-python3.11 python3 python}; do
  command -v "$candidate" >/dev/null 2>&1 || continue
  if supported "$candidate"; then
    exec "$candidate" "$here/setup.py" "$@"
  fi
  found="$found $candidate=$("$candidate" -c 'import sys; print(sys.version.split()[0])' 2>/dev/null || echo broken)"
done

echo "set-up stopped: Python 3.11 is needed (the pinned torch, vLLM and Monarch wheels are made for it)." >&2
if [ -n "$found" ]; then echo "  Found instead:$found." >&2; else echo "  No Python was found on PATH." >&2; fi
echo "  Install Python 3.11 (apt install python3.11 python3.11-venv, uv python install 3.11, pyenv install 3.11)," >&2
echo "  or name one: make PYTHON=/path/to/python3.11 setup" >&2
exit 1
