"""A batch, sent to the servers that have its keys, and sent again where that can do no harm.

A reply has its place in the batch, whatever was asked where and in which order.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from redis import exceptions

from hicache_backends.redis.address import Address
from hicache_backends.redis.in_doubt import InDoubt, settled
from hicache_backends.redis.page_io import PageRequest, get_pages, set_pages, window_of
from hicache_backends.redis.replies import (
    FAILURES,
    TIMEOUTS,
    UNANSWERED,
    ErrorReply,
    Refused,
    WrongReply,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_backends.redis.cluster import Topology
    from hicache_backends.redis.link import Link
    from hicache_backends.redis.nodes import Nodes
    from hicache_backends.redis.replies import Command, Reply
    from hicache_backends.redis.server_pool import Node
    from hicache_storage.backend_support.counters import Counters
    from hicache_storage.backend_support.deadline import Deadline
    from hicache_storage.page import Page

    Work = Callable[[Link, Sequence[int]], None]

_TRIES = 3
"""In a row that bring nothing: connections end, or keys are said to be elsewhere."""


class Router:
    """Sends batches. Thread-safe."""

    def __init__(self, nodes: Nodes, topology: Topology, counters: Counters, depth: int) -> None:
        self.nodes = nodes
        self.topology = topology
        self.counters = counters
        self._depth = depth

    def ask(
        self, keys: Sequence[bytes], commands: Sequence[Command], deadline: Deadline
    ) -> list[Reply]:
        """The reply to each command, which carries no page and may be sent twice; to each its key."""
        batch = _Batch(self, keys, deadline)

        def work(link: Link, indices: Sequence[int]) -> None:
            batch.may_ask(link)
            replies = link.exchange([commands[index] for index in indices])
            for index, reply in zip(indices, replies, strict=True):
                batch.replies[index] = reply

        return batch.run(work)

    def get(self, keys: Sequence[bytes], pages: Sequence[Page], deadline: Deadline) -> list[Reply]:
        """Read pages: True, False, an error or nothing."""
        batch = _Batch(self, keys, deadline)

        def work(link: Link, indices: Sequence[int]) -> None:
            batch.may_ask(link)
            wanted = [pages[index] for index in indices]
            # Replies that wait behind others are buffered by the server, which costs it dearly.
            window = window_of(max(1, self._depth // 2), wanted[0].nbytes)
            settle = partial(_note, batch.replies, indices)
            get_pages(link.wire, [keys[index] for index in indices], wanted, window, settle)

        return batch.run(work)

    def set(
        self, requests: Sequence[PageRequest], pages: Sequence[Page], deadline: Deadline
    ) -> list[Reply]:
        """Store pages: True, None (the key is taken), False (it will not show), an error or nothing.

        Raises:
            OSError, RedisError: Whether some of them are stored is not known.
        """
        batch = _SetBatch(self, requests, deadline)

        def work(link: Link, indices: Sequence[int]) -> None:
            window = window_of(self._depth, pages[indices[0]].nbytes)
            given = [pages[index] for index in indices]
            try:
                asked = batch.asked(link, indices)
                settle = partial(batch.stored, indices, asked)
                set_pages(link.wire, asked, given, window, settle)
            except FAILURES as error:
                raise InDoubt(link.identity) from error

        replies = batch.run(work)
        self._list_again([requests[index] for index in batch.unlisted], deadline)
        return replies

    def _list_again(self, requests: Sequence[PageRequest], deadline: Deadline) -> None:
        """List pages of which it is not known that they were listed after they were set."""
        wanted = [request for request in requests if request.listing]
        self.ask([one.listing[1] for one in wanted], [one.listing for one in wanted], deadline)


class _Batch:
    """One batch under way."""

    def __init__(self, router: Router, keys: Sequence[bytes], deadline: Deadline) -> None:
        self.router = router
        self.deadline = deadline
        self.replies: list[Reply] = [UNANSWERED] * len(keys)
        self._keys = keys
        self._asking = False
        self._asked_of: dict[int, Node] = {}
        """Who told that somebody else should be asked."""
        self._failure: Exception | None = None

    def run(self, work: Work) -> list[Reply]:
        """Do `work` for every index, on the server that has its key; the replies.

        Raises:
            OSError, RedisError: No server did any of it.
        """
        if not self._keys:
            return []
        todo: Sequence[int] = range(len(self._keys))
        in_vain = 0
        while todo and in_vain < _TRIES and not isinstance(self._failure, TIMEOUTS):
            before = len(todo)
            self._asked_of.clear()
            self._try(todo, work)
            self._follow(work)
            todo = [index for index, reply in enumerate(self.replies) if _is_open(reply)]
            in_vain = 0 if len(todo) < before else in_vain + 1
        self._conclude()
        return self.replies

    def may_ask(self, link: Link) -> None:
        """Tell a server that is only about to have the key that it is meant."""
        if self._asking:
            link.exchange([("ASKING",)])

    def resolve(self, node: Node, doubt: InDoubt, indices: Sequence[int]) -> None:
        """Find out what became of commands that may not be sent twice."""
        raise NotImplementedError(f"{node.address}: all of {indices} may be sent twice") from doubt

    def _try(self, todo: Sequence[int], work: Work) -> None:
        for index in todo:
            self.replies[index] = UNANSWERED
        try:
            groups = self._by_node(todo)
        except FAILURES as error:
            self._failed(error)
            return
        for node, indices in groups.items():
            self._do(node, indices, work)

    def _do(self, node: Node, indices: Sequence[int], work: Work) -> None:
        try:
            with node.lent(self.deadline) as link:
                work(link, indices)
                self._look_at_errors(node, link, indices)
        except InDoubt as doubt:
            self._failed(doubt)
            self.resolve(node, doubt, indices)
        except FAILURES as error:
            self._failed(error)

    def _look_at_errors(self, node: Node, link: Link, indices: Sequence[int]) -> None:
        for index in indices:
            reply = self.replies[index]
            if isinstance(reply, ErrorReply):
                self._asked_of[index] = node
                if reply.is_stale:
                    link.is_stale = True
                    self.router.topology.doubt()

    def _failed(self, error: Exception) -> None:
        self._failure = error
        self.router.topology.doubt()
        name = "wrong_replies" if isinstance(error, WrongReply) else "failed_connections"
        self.router.counters.add(name)

    def _by_node(self, todo: Sequence[int]) -> dict[Node, list[int]]:
        groups: dict[Node, list[int]] = defaultdict(list)
        for index in todo:
            node = self.router.topology.node_of(self._keys[index], self.deadline)
            if node is None:
                self._failure = exceptions.ClusterDownError("no server has the slot")
            else:
                groups[node].append(index)
        return groups

    def _follow(self, work: Work) -> None:
        """Go where ASK points to, and look at the map again after MOVED."""
        for index, node in list(self._asked_of.items()):
            reply = self.replies[index]
            if not isinstance(reply, ErrorReply) or not reply.is_redirection:
                continue
            self.router.counters.add("redirected")
            if reply.code != "ASK":
                self.router.topology.doubt()
                continue
            self.replies[index] = UNANSWERED
            try:
                target = Address.parse(reply.target, host=node.address.host)
            except ValueError:
                self._failed(WrongReply("a redirection names no server"))
                continue
            self._asking = True
            self._do(self.router.nodes.at(target), [index], work)
            self._asking = False

    def _conclude(self) -> None:
        """Raise where nothing came of the batch: a part that failed is a part of misses."""
        refused = [reply for reply in self.replies if _concerns_all(reply)]
        unanswered = sum(reply is UNANSWERED for reply in self.replies)
        if refused and len(refused) + unanswered == len(self.replies):
            raise Refused(refused[0])
        if unanswered and unanswered == len(self.replies):
            raise self._failure or WrongReply("there is no answer")
        self.router.counters.add("unanswered", unanswered + len(refused))


class _SetBatch(_Batch):
    """Pages to store: what went out on a connection that failed may yet be carried out."""

    def __init__(self, router: Router, requests: Sequence[PageRequest], deadline: Deadline) -> None:
        super().__init__(router, [request.key for request in requests], deadline)
        self._requests = requests
        self._listed_elsewhere: set[int] = set()
        self.unlisted: list[int] = []
        """Set, and not known to be listed since then: removers may have come in between."""

    def asked(self, link: Link, indices: Sequence[int]) -> list[PageRequest]:
        """The requests for a server, which are bare behind ASKING: that is for one command."""
        wanted = [self._requests[index] for index in indices]
        if not self._asking:
            return wanted
        (request,) = wanted
        if self._listed_elsewhere.intersection(indices):
            link.exchange([("ASKING",), request.listing])
        self.may_ask(link)
        return [PageRequest(request.key, request.nbytes, request.options)]

    def stored(
        self, indices: Sequence[int], asked: Sequence[PageRequest], at: int, replies: Reply
    ) -> None:
        """Take note of the replies to one request."""
        self.replies[indices[at]] = replies[asked[at].verdict_at]
        is_listed = bool(asked[at].listing) and isinstance(replies[-1], int)
        if self.replies[indices[at]] is True and not is_listed:
            self.unlisted.append(indices[at])
        if any(isinstance(reply, ErrorReply) and reply.code == "ASK" for reply in replies[:1]):
            self._listed_elsewhere.add(indices[at])

    def resolve(self, node: Node, doubt: InDoubt, indices: Sequence[int]) -> None:
        still_open = [index for index in indices if self.replies[index] is UNANSWERED]
        wanted = [self._requests[index] for index in still_open]
        verdicts = settled(node, doubt, wanted, self.deadline)
        for index, verdict in zip(still_open, verdicts, strict=True):
            self.replies[index] = verdict
            if verdict:
                self.unlisted.append(index)
        self.router.counters.add("settled_afterwards", len(still_open))


def _note(replies: list[Reply], indices: Sequence[int], at: int, reply: Reply) -> None:
    replies[indices[at]] = reply


def _is_open(reply: Reply) -> bool:
    return reply is UNANSWERED or (isinstance(reply, ErrorReply) and reply.is_redirection)


def _concerns_all(reply: Reply) -> bool:
    """Whether a command was refused for what is no matter of its key, nor of room."""
    return isinstance(reply, ErrorReply) and not (reply.is_about_the_key or reply.is_full)
