"""Real servers for the tests, each a process on a free loopback port, which ends with the test.

`tests/get_servers.sh` fetches Redis and Valkey; the S3 servers are distributions of the `dev`
group.

    with RedisServer(tmp_path) as server:
        open_storage("redis", {"url": server.url})
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, ClassVar, Self

ROOT = Path(__file__).parents[2]
FETCHED = ROOT / ".servers"
READY_LIMIT_S = 30.0
END_LIMIT_S = 20.0
_POLL_S = 0.01
_PORTS = random.SystemRandom()
_LEAST_PORT = 10_000
# Ports are taken from below the kernel's own range, unless that range begins too low.
_EPHEMERAL_PORT = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
_END_PORT = _EPHEMERAL_PORT if _EPHEMERAL_PORT > 30_000 else 60_000
_LIBRARIES = ("usr/lib/*-linux-gnu", "lib/*-linux-gnu")


def program(*names: str) -> str:
    """Return the path of the first of these programs that is installed.

    A test without its server proves nothing. So it fails if `CI` is set, and elsewhere it is
    skipped with the reason.
    """
    scripts = sysconfig.get_path("scripts")
    places = os.pathsep.join([str(FETCHED / "usr/bin"), scripts, os.environ.get("PATH", "")])
    for name in names:
        found = shutil.which(name, path=places)
        if found is not None:
            return found
    message = f"no {' or '.join(names)} here: run tests/get_servers.sh, or install it"
    if "pytest" in sys.modules:
        import pytest

        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    raise FileNotFoundError(message)  # in a benchmark


def free_port() -> int:
    """Return a loopback port that nobody uses now.

    The kernel gives ports of its own range to connections, and to listeners on port 0. This port is
    outside that range, so a test that runs at the same time can't take it before the server has
    started.
    """
    while True:
        port = _PORTS.randrange(_LEAST_PORT, _END_PORT)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class ServerProcess:
    """A server that a test may stop, pause and start again on the same port, with its data.

    It implements the kit's back door `server` (`hicache_conformance.Server`). Not thread-safe.
    """

    ready_limit_s = READY_LIMIT_S
    own_session = False
    """Whether the server leads a session, so that its children can be ended with it."""

    def __init__(self, directory: Path, port: int | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.port = port or free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """Return the command that starts the server."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        """Return further variables of the server's environment."""
        return {}

    def answers(self) -> bool:
        """Return True once the server is ready."""
        raise NotImplementedError

    @property
    def pid(self) -> int:
        assert self._process is not None, "it is not running"
        return self._process.pid

    def start(self) -> None:
        """Start the server. Return when it answers."""
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Start the server, and do not wait for it."""
        assert self._process is None, "it is running"
        environment = {**os.environ, **self.environment()}
        environment.pop("LD_PRELOAD", None)  # `make test-sanitized` sets it for Python only
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                cwd=self.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=self.own_session,
            )

    def wait_until_ready(self) -> None:
        """Return when a launched server answers. If it does not, kill it and raise RuntimeError."""
        assert self._process is not None, "it is not launched"
        deadline_s = time.monotonic() + self.ready_limit_s
        with ExitStack() as on_failure:  # that of a test's time limit, too
            on_failure.callback(self.stop)
            while not self._is_ready():
                if self._process.poll() is not None or time.monotonic() > deadline_s:
                    output = self.log.read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"{type(self).__name__} did not start; its output: {output}")
                time.sleep(_POLL_S)
            on_failure.pop_all()

    def stop(self) -> None:
        """Kill the server, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_LIMIT_S)
            self._process = None

    def pause(self) -> None:
        """Stop the server's threads. The kernel still accepts connections, but nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _is_ready(self) -> bool:
        try:
            return self.answers()
        except OSError:
            return False


class RedisServer(ServerProcess):
    """A `redis-server`, without persistence by default. `options` are those of redis.conf."""

    programs: ClassVar[tuple[str, ...]] = ("redis-server",)
    address = "127.0.0.1"

    def __init__(self, directory: Path, *options: str, port: int | None = None) -> None:
        super().__init__(directory, port)
        self.options = options

    @property
    def url(self) -> str:
        return f"redis://{self.address}:{self.port}/0"

    @property
    def socket_path(self) -> Path:
        """The server's unix socket."""
        return self.directory / "socket"

    def command(self) -> list[str]:
        fixed = f"--port {self.port} --bind {self.address} --save  --appendonly no --daemonize no"
        own = ["--dir", str(self.directory), "--unixsocket", str(self.socket_path)]
        return [program(*self.programs), *fixed.split(" "), *own, *self.options]

    def environment(self) -> Mapping[str, str]:
        return library_path()

    def answers(self) -> bool:
        with self.connected() as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64)[:1] in (b"+", b"-")  # an error such as NOAUTH is an answer

    def connected(self) -> socket.socket:
        return socket.create_connection((self.address, self.port), timeout=1)


class ValkeyServer(RedisServer):
    """A `valkey-server`, without persistence by default."""

    programs = ("valkey-server",)


class TlsRedisServer(RedisServer):
    """A Redis with TLS only, and one user with a password."""

    user = "pages"
    password = "open sesame/?#"  # noqa: S105  # every character that a URL must escape

    def __init__(self, directory: Path, *options: str) -> None:
        super().__init__(directory, *options)
        self.authority = directory / "ca.crt"
        self._certificate = directory / "server.crt"
        self._key = directory / "server.key"
        make_certificates(directory)

    def command(self) -> list[str]:
        files = f"--tls-cert-file {self._certificate} --tls-key-file {self._key}"
        fixed = f"--port 0 --tls-port {self.port} --tls-ca-cert-file {self.authority}"
        tls = f"{fixed} {files} --tls-auth-clients no"
        acl = self.directory / "users.acl"
        acl.write_text(
            "user default off\n"
            f"user {self.user} on #{_sha256(self.password)} ~* &* +@all -@dangerous +info\n"
        )
        return [*super().command(), *tls.split(), "--aclfile", str(acl)]

    def connected(self) -> socket.socket:
        context = ssl.create_default_context(cafile=str(self.authority))
        return context.wrap_socket(super().connected(), server_hostname="localhost")


class RedisCluster:
    """A cluster of three masters that share the slots, and stop, pause and start together."""

    server_class: ClassVar[type[RedisServer]] = RedisServer
    enabled = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000")
    replicas = 0
    """The replicas of each master, which are among `nodes`."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.nodes = [
            self.server_class(directory / str(number), *self.enabled, *options, port=cluster_port())
            for number in range(3)
        ]
        self._joined = False

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        if not self._joined:
            self._join()
        wait_until(self.is_whole)

    def is_whole(self) -> bool:
        """Return whether every node says that all slots are served."""
        try:
            return all("cluster_state:ok" in _cluster(node, "INFO") for node in self.nodes)
        except OSError:
            return False

    def is_settled(self) -> bool:
        """Return whether the cluster is whole, and every other node has answered each node's last ping.

        Once its cable is back, a node that was cut off still reports that all slots are served. It may
        refuse calls a moment later, because its earlier pings are overdue.
        """
        try:
            return self.is_whole() and not any(map(awaited_by, self.nodes))
        except OSError:
            return False

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def pause(self) -> None:
        for node in self.nodes:
            node.pause()

    def resume(self) -> None:
        for node in self.nodes:
            node.resume()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _join(self) -> None:
        addresses = [f"{node.address}:{node.port}" for node in self.nodes]
        client = Path(program(*self.server_class.programs)).name.replace("-server", "-cli")
        options = ["--cluster-yes", "--cluster-replicas", str(self.replicas)]
        subprocess.run(
            [program(client), "--cluster", "create", *addresses, *options],
            env={**os.environ, **self.nodes[0].environment()},
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=READY_LIMIT_S,
        )
        self._joined = True


def _cluster(node: RedisServer, command: str) -> str:
    with node.connected() as connection:
        connection.sendall(f"CLUSTER {command}\r\n".encode())
        return connection.recv(1 << 16).decode()


def awaited_by(node: RedisServer) -> list[str]:
    """Return the addresses of the nodes that have not answered a ping of `node`.

    They are read from the reply to CLUSTER NODES.
    """
    rows = [line.split() for line in _cluster(node, "NODES").splitlines() if " " in line]
    others = [row for row in rows if "myself" not in row[2]]
    return [row[1].partition(":")[0] for row in others if row[4] != "0" or row[7] != "connected"]


class S3Server(ServerProcess):
    """An S3-compatible server with one pair of keys."""

    access_key = "AKIAIOSFODNN7EXAMPLE"
    secret_key = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"  # noqa: S105  # AWS's documentation's own

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.endpoint_url, timeout=1):  # noqa: S310  # http only
                return True
        except urllib.error.HTTPError:
            return True


class Ministack(S3Server):
    """A server with S3's conditional puts and checksums, which ignores signatures."""

    def command(self) -> list[str]:
        program("ministack")
        return [sys.executable, "-m", "ministack"]

    def environment(self) -> Mapping[str, str]:
        return {
            "BIND_HOST": "127.0.0.1",
            "GATEWAY_PORT": str(self.port),
            "IOT_MTLS_ENABLED": "0",
            "SFTP_ENABLED": "0",
            "LOG_LEVEL": "ERROR",
            "S3_PERSIST": "1",
            "S3_DATA_DIR": str(self.directory / "data"),
            "TMPDIR": str(
                self.directory
            ),  # the pid file of a killed server stays in this directory
        }


class Rclone(S3Server):
    """rclone's S3 server over a directory, which checks signatures. Options are command-line flags."""

    def __init__(self, directory: Path, *options: str, port: int | None = None) -> None:
        super().__init__(directory, port)
        self.options = options

    def command(self) -> list[str]:
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        keys = f"{self.access_key},{self.secret_key}"
        address = f"127.0.0.1:{self.port}"
        options = ["--addr", address, "--auth-key", keys, "--no-cleanup"]
        return [program("rclone"), "serve", "s3", str(data), *options, *self.options]

    def environment(self) -> Mapping[str, str]:
        return {"RCLONE_CONFIG": str(self.directory / "rclone.conf")}


class TlsRclone(Rclone):
    """rclone's S3 server over TLS."""

    def __init__(self, directory: Path, port: int | None = None) -> None:
        files = [directory / name for name in ("server.crt", "server.key")]
        super().__init__(directory, "--cert", str(files[0]), "--key", str(files[1]), port=port)
        self.authority = directory / "ca.crt"
        make_certificates(directory)

    @property
    def endpoint_url(self) -> str:
        return f"https://localhost:{self.port}"

    def answers(self) -> bool:
        with socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True


class MooncakeMaster(ServerProcess):
    """A `mooncake_master`, which keeps the list of objects in memory."""

    address = "127.0.0.1"

    def __init__(self, directory: Path, *options: str) -> None:
        super().__init__(directory)
        self.metrics_port = free_port()
        self.options = options

    def command(self) -> list[str]:
        ports = [f"--rpc_port={self.port}", f"--metrics_port={self.metrics_port}"]
        ports += ["--default_kv_lease_ttl=200ms"]  # how long a page that was read can't be deleted
        hosts = [f"--rpc_address={self.address}", f"--metrics_host={self.address}"]
        return [program("mooncake_master"), *hosts, *ports, "--logtostderr=true", *self.options]

    def environment(self) -> Mapping[str, str]:
        return library_path()

    def answers(self) -> bool:
        socket.create_connection((self.address, self.port), timeout=1).close()
        url = f"http://{self.address}:{self.metrics_port}/health"
        with urllib.request.urlopen(url, timeout=1):  # http only
            return True

    def config(self, **fields: Any) -> dict[str, Any]:
        """Return the config of a storage on this master."""
        return {
            "master_server_address": f"{self.address}:{self.port}",
            "master_metrics_port": self.metrics_port,
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            "global_segment_size": "64mb",
            **fields,
        }


class MooncakeNode:
    """A storage node: a process that only lends memory to a Mooncake cluster."""

    _CODE = """
import json, sys
from hicache_storage import open_storage
with open_storage("mooncake", json.loads(sys.argv[1])):
    print("ready", flush=True)
    sys.stdin.read()
"""

    def __init__(self, master: MooncakeMaster, segment: str) -> None:
        self._config = json.dumps(master.config(global_segment_size=segment))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-c", self._CODE, self._config],
            env={**os.environ, **library_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None, "it is not running"
        return self._process.pid

    def __exit__(self, *exc_info: object) -> None:
        assert self._process is not None
        try:
            self._process.communicate(timeout=END_LIMIT_S)
        except subprocess.TimeoutExpired:  # the master is gone
            self._process.kill()
            self._process.communicate()


def library_path() -> dict[str, str]:
    """Return an environment in which programs find the libraries of `tests/get_servers.sh`."""
    libraries = [str(path) for place in _LIBRARIES for path in FETCHED.glob(place)]
    known = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": os.pathsep.join(libraries + ([known] if known else []))}


def load_mooncake() -> None:
    """Make the libraries of Mooncake's client available to this process and its children."""
    # Load each library after its dependencies, because the loader reuses a library that is loaded.
    for name in ("libnl-3.so.200", "libnl-route-3.so.200", "libibverbs.so.1"):
        for place in _LIBRARIES:
            for path in FETCHED.glob(f"{place}/{name}"):
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    os.environ.update(library_path())


def wait_until(condition: Callable[[], bool], limit_s: float = READY_LIMIT_S) -> None:
    """Return when `condition` holds."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not so within {limit_s:g} s")
        time.sleep(_POLL_S)


def cluster_port() -> int:
    """Return a port whose cluster bus, 10,000 above it, is free too."""
    while True:
        port = free_port()
        if port + 10000 >= _END_PORT:
            continue
        try:
            with socket.create_server(("127.0.0.1", port + 10000)):
                return port
        except OSError:
            continue


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def make_certificates(directory: Path) -> None:
    """Create a certificate authority, and a certificate for `localhost` and 127.0.0.1.

    Python 3.13 accepts only those that name the use of a key, and the key of their authority.
    """
    authority = (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 2 -subj /CN=tests"
        " -addext keyUsage=critical,keyCertSign"
    )
    request = "req -newkey rsa:2048 -nodes -keyout server.key -out server.csr -subj /CN=localhost"
    signing = "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2"
    (directory / "names").write_text(
        "subjectAltName=DNS:localhost,IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n"
    )
    for arguments in (authority, request, f"{signing} -out server.crt -extfile names"):
        subprocess.run(
            [program("openssl"), *arguments.split()], cwd=directory, check=True, capture_output=True
        )
