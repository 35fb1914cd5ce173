#!/usr/bin/env bash
# Fetch the servers that the tests run against from Debian, into .servers/, without installing them:
# nothing is started, nothing outside this folder changes, and no root is needed.
#
#   .servers/usr/bin/redis-server                      Debian's redis
#   .servers/usr/bin/valkey-server                     Debian's backport of valkey
#   .servers/usr/bin/prometheus, promtool              Debian's Prometheus
#   .servers/usr/lib/*-linux-gnu/libibverbs.so.1 ...   what Mooncake's client and master are linked to
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD/.servers
release=${DEBIAN_RELEASE:-bookworm}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
packages=(redis-tools libjemalloc2 liblzf1 libatomic1 liblua5.1-0 lua-cjson lua-bitop
          valkey-tools/"$release"-backports libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 libcurl4 prometheus)

if [ -x "$root/usr/bin/valkey-server" ] && [ -x "$root/usr/bin/redis-server" ] \
  && [ -x "$root/usr/bin/promtool" ] && compgen -G "$root/usr/lib/*-linux-gnu/libibverbs.so.1" > /dev/null; then
  exit 0
fi
if ! command -v apt-get > /dev/null || ! command -v dpkg-deb > /dev/null; then
  echo "no apt-get here: install redis-server 7, valkey-server 8 and prometheus 2.42, or newer, on the PATH" >&2
  exit 0 # the tests say which servers they miss
fi

keyring=/usr/share/keyrings/debian-archive-keyring.gpg
if [ ! -r "$keyring" ]; then
  echo "there is no $keyring to check Debian's packages with: apt-get install debian-archive-keyring" >&2
  exit 1
fi

# Of this machine, apt takes its proxies, and neither what is installed, nor what is preferred or pinned: a package that
# has had a security update has a version that is in none of these lists.
apt=$root/apt
mkdir -p "$apt/lists/partial" "$apt/archives/partial"
: > "$apt/status"
for suite in "$release" "$release-backports"; do
  echo "deb [arch=$(dpkg --print-architecture) signed-by=$keyring] $mirror $suite main"
done > "$apt/sources.list"
options=(-qq -o Acquire::Retries=5 -o Acquire::Languages=none -o APT::Update::Error-Mode=any
         -o "Dir::Etc::sourcelist=$apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
         -o Dir::Etc::preferences=/dev/null -o Dir::Etc::preferencesparts=/dev/null -o APT::Default-Release=
         -o "Dir::State=$apt" -o "Dir::State::status=$apt/status" -o "Dir::Cache=$apt"
         -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=)
apt-get "${options[@]}" update
(cd "$apt/archives" && apt-get "${options[@]}" download "${packages[@]}")
for package in "$apt"/archives/*.deb; do
  dpkg-deb -x "$package" "$root"
done
for name in redis valkey; do # Debian ships the server as a link in a package with init scripts
  test -e "$root/usr/bin/$name-server" || ln -s "$name-check-rdb" "$root/usr/bin/$name-server"
done
