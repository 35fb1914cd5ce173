"""Send batches to the servers that have their keys, and repeat commands that may be sent twice.

Each reply is stored at its command's position in the batch, whatever the order of the servers.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from redis import exceptions

from hicache_backends.redis.page_io import (
    PageRequest,
    get_lengths,
    get_pages,
    set_pages,
    set_window,
    window_of,
)
from hicache_backends.redis.replies import (
    FAILURES,
    TIMEOUTS,
    UNANSWERED,
    ErrorReply,
    Refused,
    WrongReply,
)
from hicache_backends.redis.writes_in_doubt import WritesInDoubt, resolve_writes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_backends.redis.cluster import Deployment
    from hicache_backends.redis.connection import Connection
    from hicache_backends.redis.replies import Command, Reply
    from hicache_backends.redis.server_pool import ServerPool, ServerPools
    from hicache_storage.backend_support.counters import Counters
    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.page import Page

    Work = Callable[[Connection, Sequence[int]], None]

_MAX_FAILED_ROUNDS = 3
"""How many rounds in a row may bring no new reply, because connections end or keys have moved."""


class Router:
    """A router that sends each command of a batch to the server that has its key. Thread-safe."""

    def __init__(
        self, pools: ServerPools, deployment: Deployment, counters: Counters, depth: int
    ) -> None:
        self.pools = pools
        self.deployment = deployment
        self.counters = counters
        self._depth = depth

    def execute(
        self, keys: Sequence[bytes], commands: Sequence[Command], deadline: Deadline
    ) -> list[Reply]:
        """Return the replies to commands, one for each key.

        The commands must carry no page and must be safe to send twice.
        """
        batch = _Batch(self, keys, deadline)

        def work(connection: Connection, positions: Sequence[int]) -> None:
            batch.send_asking(connection)
            replies = connection.execute([commands[position] for position in positions])
            for position, reply in zip(positions, replies, strict=True):
                batch.replies[position] = reply

        return batch.run(work)

    def lengths(self, keys: Sequence[bytes], deadline: Deadline) -> list[Reply]:
        """Return the length of each key's value. Each reply is an int, an error or `UNANSWERED`."""
        batch = _Batch(self, keys, deadline)

        def work(connection: Connection, positions: Sequence[int]) -> None:
            batch.send_asking(connection)
            found = get_lengths(connection.socket, [keys[position] for position in positions])
            for position, reply in zip(positions, found, strict=True):
                batch.replies[position] = reply

        return batch.run(work)

    def get(self, keys: Sequence[bytes], pages: Sequence[Page], deadline: Deadline) -> list[Reply]:
        """Read pages. Each reply is True, False, an error or `UNANSWERED`."""
        batch = _Batch(self, keys, deadline)

        def work(connection: Connection, positions: Sequence[int]) -> None:
            batch.send_asking(connection)
            targets = [pages[position] for position in positions]
            # If replies wait behind others, the server buffers them, which is expensive.
            window = window_of(max(1, self._depth // 2), targets[0].nbytes)
            settle = partial(_note, batch.replies, positions)
            get_pages(
                connection.socket,
                [keys[position] for position in positions],
                targets,
                window,
                settle,
            )

        return batch.run(work)

    def set(
        self, requests: Sequence[PageRequest], pages: Sequence[Page], deadline: Deadline
    ) -> list[Reply]:
        """Store pages. Each reply is True, None (the key exists), False, an error or `UNANSWERED`.

        False means that the page is not stored, and will not appear later.

        Raises:
            OSError, RedisError: Some pages may or may not be stored.
        """
        batch = _SetBatch(self, requests, deadline)

        def work(connection: Connection, positions: Sequence[int]) -> None:
            nbytes = pages[positions[0]].nbytes
            window = set_window(self._depth, nbytes, is_alone=connection.pool.in_use == 1)
            sources = [pages[position] for position in positions]
            try:
                sent = batch.requests_for(connection, positions)
                settle = partial(batch.note, positions, sent)
                set_pages(connection.socket, sent, sources, window, settle)
            except FAILURES as error:
                raise WritesInDoubt(connection.identity) from error

        replies = batch.run(work)
        self._list_again([requests[position] for position in batch.unlisted], deadline)
        return replies

    def _list_again(self, requests: Sequence[PageRequest], deadline: Deadline) -> None:
        """List pages that a remover may have unlisted since they were set."""
        listed = [request for request in requests if request.index_command]
        self.execute(
            [one.index_command[1] for one in listed],
            [one.index_command for one in listed],
            deadline,
        )


class _Batch:
    """A batch in progress."""

    def __init__(self, router: Router, keys: Sequence[bytes], deadline: Deadline) -> None:
        self.router = router
        self.deadline = deadline
        self.replies: list[Reply] = [UNANSWERED] * len(keys)
        self._keys = keys
        self._is_asking = False
        self._refused_by: dict[int, ServerPool] = {}
        """The server that answered a position with an error in this round."""
        self._failure: Exception | None = None

    def run(self, work: Work) -> list[Reply]:
        """Do `work` for every position, on the server that has its key. Return the replies.

        Raises:
            OSError, RedisError: No server has done any of the work.
        """
        if not self._keys:
            return []
        todo: Sequence[int] = range(len(self._keys))
        failed_rounds = 0
        while todo and failed_rounds < _MAX_FAILED_ROUNDS and not self._has_timed_out():
            before = len(todo)
            self._refused_by.clear()
            self._run_round(todo, work)
            self._follow_redirections(work)
            todo = [position for position, reply in enumerate(self.replies) if _is_open(reply)]
            failed_rounds = 0 if len(todo) < before else failed_rounds + 1
        self._conclude()
        return self.replies

    def send_asking(self, connection: Connection) -> None:
        """Send ASKING if the server is importing the slot and does not own it yet."""
        if self._is_asking:
            connection.execute([("ASKING",)])

    def resolve(self, server: ServerPool, doubt: WritesInDoubt, positions: Sequence[int]) -> None:
        """Find out which writes in doubt were carried out, because they must not be sent twice."""
        raise NotImplementedError(
            f"{server.address}: all of {positions} may be sent twice"
        ) from doubt

    # --- parts -----------------------------------------------------------------------------------

    def _has_timed_out(self) -> bool:
        return isinstance(self._failure, TIMEOUTS)

    def _run_round(self, todo: Sequence[int], work: Work) -> None:
        for position in todo:
            self.replies[position] = UNANSWERED
        try:
            groups = self._group_by_server(todo)
        except FAILURES as error:
            self._note_failure(error)
            return
        for server, positions in groups.items():
            self._run_on(server, positions, work)

    def _run_on(self, server: ServerPool, positions: Sequence[int], work: Work) -> None:
        try:
            with server.acquire(self.deadline) as connection:
                work(connection, positions)
                self._note_errors(server, positions)
        except WritesInDoubt as doubt:
            self._note_failure(doubt)
            self.resolve(server, doubt, positions)
        except FAILURES as error:
            self._note_failure(error)

    def _note_errors(self, server: ServerPool, positions: Sequence[int]) -> None:
        for position in positions:
            reply = self.replies[position]
            if isinstance(reply, ErrorReply):
                self._refused_by[position] = server
                if reply.is_stale:
                    server.retire()
                    self.router.deployment.invalidate()

    def _note_failure(self, error: Exception) -> None:
        self._failure = error
        self.router.deployment.invalidate()
        name = "wrong_replies" if isinstance(error, WrongReply) else "failed_connections"
        self.router.counters.add(name)

    def _group_by_server(self, todo: Sequence[int]) -> dict[ServerPool, list[int]]:
        groups: dict[ServerPool, list[int]] = defaultdict(list)
        for position in todo:
            server = self.router.deployment.server_of(self._keys[position], self.deadline)
            if server is None:
                self._failure = exceptions.ClusterDownError("no server has the slot")
            else:
                groups[server].append(position)
        return groups

    def _follow_redirections(self, work: Work) -> None:
        """Send commands to the servers that ASK names. After MOVED, invalidate the deployment."""
        for position, server in list(self._refused_by.items()):
            reply = self.replies[position]
            if not isinstance(reply, ErrorReply) or not reply.is_redirection:
                continue
            self.router.counters.add("redirected")
            if reply.code != "ASK":
                self.router.deployment.invalidate()
                continue
            self.replies[position] = UNANSWERED
            try:
                target = reply.target(server.address.host)
            except ValueError:
                self._note_failure(WrongReply("a redirection names no server"))
                continue
            self._is_asking = True
            self._run_on(self.router.pools.at(target), [position], work)
            self._is_asking = False

    def _conclude(self) -> None:
        """Raise if the batch has no result at all. Otherwise count the failed part as misses."""
        refused = [reply for reply in self.replies if _concerns_all(reply)]
        unanswered = sum(reply is UNANSWERED for reply in self.replies)
        if refused and len(refused) + unanswered == len(self.replies):
            raise Refused(refused[0])
        if unanswered and unanswered == len(self.replies):
            raise self._failure or WrongReply("there is no answer")
        self.router.counters.add("unanswered", unanswered + len(refused))


class _SetBatch(_Batch):
    """A batch of pages to store. If a connection fails, the server may still carry out its writes."""

    def __init__(self, router: Router, requests: Sequence[PageRequest], deadline: Deadline) -> None:
        super().__init__(router, [request.key for request in requests], deadline)
        self._requests = requests
        self._index_moved: set[int] = set()
        """Requests whose index has moved to the server that ASK names."""
        self.unlisted: list[int] = []
        """Pages that are set, but may have been unlisted by a remover since."""

    def requests_for(self, connection: Connection, positions: Sequence[int]) -> list[PageRequest]:
        """Return the requests for a server. Leave the index command out if ASKING is needed.

        ASKING holds for only one command.
        """
        requests = [self._requests[position] for position in positions]
        if not self._is_asking:
            return requests
        (request,) = requests
        if self._index_moved.intersection(positions):
            connection.execute([("ASKING",), request.index_command])
        self.send_asking(connection)
        return [PageRequest(request.key, request.nbytes, request.options)]

    def note(
        self, positions: Sequence[int], sent: Sequence[PageRequest], at: int, replies: Reply
    ) -> None:
        """Note the replies to one request."""
        self.replies[positions[at]] = replies[sent[at].verdict_at]
        is_listed = bool(sent[at].index_command) and isinstance(replies[-1], int)
        if self.replies[positions[at]] is True and not is_listed:
            self.unlisted.append(positions[at])
        if any(isinstance(reply, ErrorReply) and reply.code == "ASK" for reply in replies[:1]):
            self._index_moved.add(positions[at])

    def resolve(self, server: ServerPool, doubt: WritesInDoubt, positions: Sequence[int]) -> None:
        still_open = [position for position in positions if self.replies[position] is UNANSWERED]
        requests = [self._requests[position] for position in still_open]
        verdicts = resolve_writes(server, doubt, requests, self.deadline)
        for position, verdict in zip(still_open, verdicts, strict=True):
            self.replies[position] = verdict
            if verdict:
                self.unlisted.append(position)
        self.router.counters.add("settled_afterwards", len(still_open))


def _note(replies: list[Reply], positions: Sequence[int], at: int, reply: Reply) -> None:
    replies[positions[at]] = reply


def _is_open(reply: Reply) -> bool:
    return reply is UNANSWERED or (isinstance(reply, ErrorReply) and reply.is_redirection)


def _concerns_all(reply: Reply) -> bool:
    """Return True for a refusal that is caused neither by the key nor by a lack of memory."""
    return isinstance(reply, ErrorReply) and not (reply.is_about_the_key or reply.is_full)
