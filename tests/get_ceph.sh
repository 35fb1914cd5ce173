#!/usr/bin/env bash
# Fetch Ceph from Debian into .servers/ceph, for `make test-rgw`: 66 MB, 260 MB unpacked. Nothing is
# installed, nothing outside this folder changes, and no root is needed.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD/.servers/ceph
release=${DEBIAN_RELEASE:-bookworm}
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}

if [ -x "$root/usr/bin/radosgw" ]; then
  exit 0
fi
apt=$PWD/.servers/apt-ceph
mkdir -p "$apt/lists/partial" "$apt/archives/partial" "$root"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keyring] $mirror $release main" > "$apt/sources.list"
options=(-qq -o "Dir::Etc::sourcelist=$apt/sources.list" -o "Dir::Etc::sourceparts=-"
         -o "Dir::State::lists=$apt/lists" -o "Dir::Cache::archives=$apt/archives"
         -o "Dir::Cache::pkgcache=" -o "Dir::Cache::srcpkgcache=" -o "APT::Sandbox::User="
         -o "Debug::NoLocking=1")
apt-get "${options[@]}" update
# with what they depend on, as far as this machine does not have it
apt-get "${options[@]}" --no-install-recommends -y --download-only install \
  radosgw ceph-mon ceph-osd ceph-mgr- > /dev/null
for package in "$apt"/archives/*.deb; do
  dpkg-deb -x "$package" "$root"
done
rm -r "$apt"
