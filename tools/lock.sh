#!/bin/sh
# Writes requirements/EXTRA.txt, the whole closure of pyproject.toml, keeping the present pins where they still fit.
# Usage: tools/lock.sh VENV/bin cpu|cuda
set -eu

bin=$1 extra=$2 target=requirements/$2.txt
{
  echo "# Every package of the $(echo "$extra" | tr a-z A-Z) environment, pinned. Written by \`make lock\` from pyproject.toml and overrides-$extra.txt."
  UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
  [ "$extra" = cpu ] && export UV_FIND_LINKS || unset UV_FIND_LINKS
  grep -v '^#' "$target" >"$target.old"
  "$bin/uv" pip compile --quiet pyproject.toml --extra "$extra" --group dev --override "requirements/overrides-$extra.txt" \
    --python-version 3.11 --no-header --no-annotate --no-emit-index-url --no-emit-find-links --output-file "$target.old" >/dev/null
  cat "$target.old"
} >"$target.new" || { rm -f "$target.new" "$target.old"; exit 1; }
rm -f "$target.old"
mv "$target.new" "$target"
