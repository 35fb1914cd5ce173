#!/usr/bin/env bash
# Install into a virtual environment what `pip install` would, and make the environment if it is not there:
#
#   tests/install.sh .venv -c constraints.txt -e .
#
# uv does it: five environments hold torch, and uv unpacks it once and links its files. The environment of this
# script is .venv-uv. uv reads none of pip's settings, so that those that choose packages are passed on. Where uv
# fails, pip installs: it knows the rest of its settings.
set -euo pipefail
environment=$1
shift
root=$(dirname "$0")/..
home=$root/.venv-uv
python=${PYTHON:-python3}

lacks=
if ! command -v "$python" > /dev/null; then
  lacks="there is no $python here"
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  lacks="$python is $("$python" --version 2>&1), which is too old"
elif ! "$python" -c 'import ensurepip, venv' 2> /dev/null; then
  lacks="$python cannot make virtual environments"
fi
if [ -n "$lacks" ]; then
  echo "$lacks: run apt-get install python3-venv, or name a Python 3.11 or newer, as in make demo PYTHON=python3.12" >&2
  exit 1
fi

# Make the environment of uv, once: make installs two environments at a time.
has_uv() {
  mkdir -p "$home" && (
    flock 9 && { [ -x "$home/bin/uv" ] || { "$python" -m venv "$home" &&
      "$home/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" uv; }; }
  ) 9> "$home/.lock"
}

# Print the value of a setting of pip: of its variable before its files. Items are separated by spaces.
pip_setting() {
  local section
  for section in :env: install global; do
    sed -nE "s/^$section\.$1='(.*)'$/\1/p" <<< "$settings" | grep . && return
  done
}

# The SDK is built again even where pyproject.toml has not changed: its C sources may have.
by_uv() {
  local settings found
  settings=$("$home/bin/python" -m pip config list 2> /dev/null)
  if found=$(pip_setting find-links); then export UV_FIND_LINKS="${UV_FIND_LINKS:-${found// /,}}"; fi
  if found=$(pip_setting index-url); then export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$found}"; fi
  export UV_SYSTEM_CERTS=1 UV_PYTHON_DOWNLOADS=never
  { [ -x "$environment/bin/python" ] || "$home/bin/uv" venv --quiet --seed --python "$python" "$environment"; } &&
    "$home/bin/uv" pip install --quiet --python "$environment/bin/python" --reinstall-package hicache-storage "$@"
}

has_uv && by_uv "$@" && exit
echo "uv did not install $*; trying pip" >&2
"$python" -m venv "$environment" # also if there is one without pip
"$environment/bin/python" -m pip install --quiet --disable-pip-version-check 'pip>=25.1' # for --group
exec "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
