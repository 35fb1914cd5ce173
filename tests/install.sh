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

mkdir -p "$home"
exec 9> "$home/.lock" # make installs two environments at a time
flock 9
if [ ! -x "$home/bin/uv" ]; then
  "$python" -m venv "$home"
  "$home/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" uv
fi
exec 9>&-

# The value of a setting of pip, which its variable has, or its files; items are separated by spaces.
pip_setting() {
  "$home/bin/python" -m pip config list 2> /dev/null | sed -nE "s/^(global|install|:env:)\.$1='(.*)'$/\2/p" | tail -n 1
}

found=$(pip_setting find-links)
export UV_FIND_LINKS=${UV_FIND_LINKS:-${found// /,}}
index=$(pip_setting index-url)
export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${index:-https://pypi.org/simple}}
export UV_SYSTEM_CERTS=1 UV_PYTHON_DOWNLOADS=never

if [ ! -x "$environment/bin/python" ]; then
  "$home/bin/uv" venv --quiet --seed --python "$python" "$environment"
fi
# The SDK is built again even where pyproject.toml has not changed: its C sources may have.
"$home/bin/uv" pip install --quiet --python "$environment/bin/python" --reinstall-package hicache-storage "$@" && exit
echo "uv did not install $*; trying pip" >&2
exec "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
