"""Ceph RGW with one monitor and one object store in memory, for `make test-rgw`.

`tests/get_ceph.sh` fetches Ceph from Debian. Nothing is installed, and root is not needed.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path

from servers import FETCHED, S3Server, ServerProcess, free_port, make_certificates

CEPH = FETCHED / "ceph"
_LIBRARIES = CEPH / "usr/lib/x86_64-linux-gnu"
_COMMAND_LIMIT_S = 120.0
_ALL = ("--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *")
_CONF = """
[global]
fsid = {fsid}
mon_host = v2:127.0.0.1:{port}
mon_initial_members = a
public_network = 127.0.0.0/8
run_dir = {directory}
admin_socket = {directory}/$name.asok
log_file = {directory}/$name.log
pid_file = {directory}/$name.pid
keyring = {directory}/keyring
mon_data = {directory}/mon
mon_allow_pool_size_one = true
osd_data = {directory}/osd
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_crush_chooseleaf_type = 0
osd_class_dir = {libraries}/rados-classes
erasure_code_dir = {libraries}/ceph/erasure-code
plugin_dir = {libraries}/ceph
"""


class _Daemon(ServerProcess):
    """One of Ceph's processes."""

    def __init__(self, cluster: Path, *command: str) -> None:
        super().__init__(cluster)
        self._command = command

    def command(self) -> list[str]:
        return _command(*self._command)

    def environment(self) -> Mapping[str, str]:
        return environment(self.directory)

    def answers(self) -> bool:
        return True

    @property
    def log(self) -> Path:
        return self.directory / f"{self._command[0]}.out"


class CephRgw(S3Server):
    """RGW, which can be stopped and paused. The cluster behind it runs on and keeps the data."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._monitor = _Daemon(directory, "ceph-mon", "-f", "-i", "a")
        self._store = _Daemon(directory, "ceph-osd", "-f", "-i", "0")
        self._is_made = False
        self._tls_port = free_port()
        self.authority = directory / "ca.crt"
        make_certificates(directory)

    @property
    def tls_endpoint_url(self) -> str:
        return f"https://localhost:{self._tls_port}"

    @staticmethod
    def secret_of(user: str) -> str:
        """Return the secret key of a user that `add_user` made. Its access key is its name."""
        return f"{user}-secret-key"

    def add_user(self, name: str) -> None:
        """Add a user without any rights to the buckets of other users."""
        keys = (f"--access-key={name}", f"--secret={self.secret_of(name)}")
        self._run(
            "radosgw-admin", "user", "create", f"--uid={name}", f"--display-name={name}", *keys
        )

    def limit(self, bucket: str, nbytes: int) -> None:
        """Give a bucket a quota."""
        scope = ("--quota-scope=bucket", f"--bucket={bucket}")
        self._run("radosgw-admin", "quota", "set", *scope, f"--max-size={nbytes}")
        self._run("radosgw-admin", "quota", "enable", *scope)

    def command(self) -> list[str]:
        plain, by_tls = (f"127.0.0.1:{port}" for port in (self.port, self._tls_port))
        certificate = f"ssl_certificate={self.directory}/server.crt"
        key = f"ssl_private_key={self.directory}/server.key"
        frontend = f"beast endpoint={plain} ssl_endpoint={by_tls} {certificate} {key}"
        return _command("radosgw", "-f", "-n", "client.rgw", f"--rgw_frontends={frontend}")

    def environment(self) -> Mapping[str, str]:
        return environment(self.directory)

    def start(self) -> None:
        if not self._is_made:
            self._is_made = True
            try:
                self._make()
            except BaseException:
                self.__exit__()
                raise
        super().start()

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        self._store.stop()
        self._monitor.stop()

    def _make(self) -> None:
        """Create a cluster with one user and no data."""
        fsid, port = str(uuid.uuid4()), free_port()
        conf = _CONF.format(fsid=fsid, port=port, directory=self.directory, libraries=_LIBRARIES)
        (self.directory / "ceph.conf").write_text(conf)
        for name in ("mon", "osd"):
            (self.directory / name).mkdir()
        (self.directory / "keyring").touch()
        for name in ("mon.", "client.admin", "client.rgw", "osd.0"):
            self._run("ceph-authtool", "keyring", "--gen-key", "-n", name, *_ALL)
        address = f"[v2:127.0.0.1:{port}]"
        self._run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, "map")
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", "map", "--keyring", "keyring")
        self._monitor.start()
        store_id = str(uuid.uuid4())
        self._run("ceph", "osd", "new", store_id)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", store_id)
        self._store.start()
        keys = (f"--access-key={self.access_key}", f"--secret={self.secret_key}")
        self._run("radosgw-admin", "user", "create", "--uid=pages", "--display-name=pages", *keys)

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            _command(*command),
            cwd=self.directory,
            env={**os.environ, **self.environment()},
            capture_output=True,
            text=True,
            timeout=_COMMAND_LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stderr[-1000:]}")


def environment(directory: Path) -> dict[str, str]:
    """Return the environment variables by which Ceph's programs find their files and each other."""
    libraries = (_LIBRARIES, _LIBRARIES / "ceph", CEPH / "lib/x86_64-linux-gnu")
    return {
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        "PYTHONPATH": str(CEPH / "usr/lib/python3/dist-packages"),
        "CEPH_CONF": str(directory / "ceph.conf"),
    }


def _command(name: str, *arguments: str) -> list[str]:
    program = [str(CEPH / "usr/bin" / name), *arguments]
    # this program needs Debian's own Python, for which its modules are built
    return ["/usr/bin/python3", *program] if name == "ceph" else program
