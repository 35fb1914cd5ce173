"""One connection to the server: connects, sends one request, receives its reply, and never blocks."""

from __future__ import annotations

import os
import select
import socket
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_backends.s3.replies import SCRATCH_NBYTES, Malformed, ReplyReader

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.s3.addresses import Address
    from hicache_backends.s3.replies import Reply

_IOV_MAX = 1024
_BOTH = select.POLLIN | select.POLLOUT
_TURN_NBYTES = 4 << 20
"""So much moves before the owner looks at its deadline again, however fast the peer is."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Request:
    """What is sent, and where the body of a successful reply goes."""

    head: bytes
    body: Sequence[memoryview] = ()
    has_reply_body: bool = True
    """False: a HEAD."""
    into: Sequence[memoryview] = ()
    into_nbytes: int = 0


class Connection:
    """A socket that carries one request at a time. Of one thread at a time.

    Methods raise OSError and `Malformed`; after either the connection is of no more use.
    """

    def __init__(self, address: Address, tls: ssl.SSLContext | None, host: str) -> None:
        self._tls = tls
        self._host = host
        self._scratch = bytearray(SCRATCH_NBYTES)
        self._unsent: list[memoryview] = []
        self._reader: ReplyReader | None = None
        self._is_cut = False
        self._wants = select.POLLOUT
        self.is_connected = False
        self.was_used = False
        """It has carried a request before this one."""
        self.moved_s = 0.0
        """When something last moved, for its owner to write down."""
        self._socket = socket.socket(address.family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._connect(address)
        except BaseException:
            self._socket.close()
            raise
        self.fd = self._socket.fileno()

    @property
    def wants(self) -> int:
        """The events that it waits for, as a mask of `select.poll`."""
        return self._wants

    @property
    def is_sent(self) -> bool:
        """The whole request is on its way: the server may have it."""
        return self.is_connected and not self._unsent and not self._is_cut

    @property
    def is_silent(self) -> bool:
        """Nothing of a reply has come yet."""
        return self._reader is None or not self._reader.began

    @property
    def is_reusable(self) -> bool:
        reader = self._reader
        return self.is_sent and reader is not None and reader.reply is not None and reader.reusable

    def is_idle(self) -> bool:
        """Nothing has come since the last reply, not even the end of the connection."""
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        return not poller.poll(0)

    def begin(self, request: Request) -> None:
        """Start with a request, and send what can be sent at once."""
        self.was_used = self._reader is not None
        self._unsent = [memoryview(request.head), *request.body]
        self._reader = ReplyReader(
            self._scratch,
            has_body=request.has_reply_body,
            into=request.into,
            into_nbytes=request.into_nbytes,
        )
        if self.is_connected:
            self._send()

    def go_on(self, events: int) -> Reply | None:
        """Do what can be done after `events`; the reply, once it is complete."""
        if not self.is_connected and not self._finish_connecting():
            return None
        if events & ~select.POLLOUT:
            reply = self._receive()
            if reply is not None:
                return reply
        if self._unsent and not self._is_cut and events & ~select.POLLIN:
            self._send_unless_cut()
        return None

    def close(self) -> None:
        self._socket.close()

    # --- connecting ----------------------------------------------------------------------------------

    def _connect(self, address: Address) -> None:
        try:
            self._socket.connect(address.sockaddr)
        except BlockingIOError:
            return

    def _finish_connecting(self) -> bool:
        if not isinstance(self._socket, ssl.SSLSocket):
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            if self._tls is not None:
                self._socket = self._tls.wrap_socket(
                    self._socket, server_hostname=self._host, do_handshake_on_connect=False
                )
        if isinstance(self._socket, ssl.SSLSocket):
            try:
                self._socket.do_handshake()
            except ssl.SSLWantReadError:
                self._wants = select.POLLIN
                return False
            except ssl.SSLWantWriteError:
                self._wants = select.POLLOUT
                return False
        self.is_connected = True
        self._wants = _BOTH
        return True

    # --- sending -------------------------------------------------------------------------------------

    def _send_unless_cut(self) -> None:
        """A server may reply, and close, before it has read everything: its reply counts."""
        try:
            self._send()
        except (BrokenPipeError, ConnectionResetError):
            self._is_cut = True
            self._wants = select.POLLIN

    def _send(self) -> None:
        unsent, left = self._unsent, _TURN_NBYTES
        try:
            while unsent and left > 0:
                if isinstance(self._socket, ssl.SSLSocket):
                    sent = self._socket.send(unsent[0])
                else:
                    sent = self._socket.sendmsg(unsent[:_IOV_MAX])
                _drop(unsent, sent)
                left -= sent
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self._wants = _BOTH
            return
        self._wants = _BOTH if unsent else select.POLLIN

    # --- receiving -----------------------------------------------------------------------------------

    def _receive(self) -> Reply | None:
        reader = self._reader
        if reader is None:
            raise Malformed("the server spoke first")
        left = _TURN_NBYTES
        try:
            while reader.reply is None and (left > 0 or self._has_pending()):
                taken, may_be_more = self._receive_into(reader)
                if not may_be_more:
                    break
                left -= taken
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        return reader.reply

    def _receive_into(self, reader: ReplyReader) -> tuple[int, bool]:
        """Receive once; return how much came, and whether there may be more."""
        room = reader.room()
        if len(room) == 1 or isinstance(self._socket, ssl.SSLSocket):
            taken = self._socket.recv_into(room[0])
        else:
            taken = self._socket.recvmsg_into(room[:_IOV_MAX])[0]
        more = taken >= len(room[0])
        reader.took(taken)
        return taken, more or isinstance(self._socket, ssl.SSLSocket)

    def _has_pending(self) -> bool:
        """Return True where TLS holds bytes that have left the socket: no poll reports them."""
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0


def _drop(views: list[memoryview], nbytes: int) -> None:
    """Take the first `nbytes` away from `views`."""
    done = 0
    while done < len(views) and nbytes >= len(views[done]):
        nbytes -= len(views[done])
        done += 1
    del views[:done]
    if nbytes:
        views[0] = views[0][nbytes:]
