"""`striped` as a HiCacheStorage: each page is in one of several stores, which work at the same time."""

from __future__ import annotations

from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, Self

from hicache_backends.striped.placement import Placement
from hicache_backends.striped.settings import StripedSettings
from hicache_storage.backend_support.answers import answers_of, unanswered_in
from hicache_storage.composition.labels import LABEL, Labels, UnlabelledStorage, is_label
from hicache_storage.composition.member import noting
from hicache_storage.composition.storage import ComposedStorage, Opening
from hicache_storage.errors import StorageTimeout
from hicache_storage.settings import counted
from hicache_storage.storage import Diagnosis, PageTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from hicache_storage.composition.member import Member, PendingCall
    from hicache_storage.keys import KeySpace
    from hicache_storage.page import Page
    from hicache_storage.storage import HiCacheStorage


class StripedStorage(ComposedStorage):
    """A storage whose pages are spread over several stores, its stripes. Thread-safe.

    The stripes get the caller's pages. A call waits at most `timeout_s` for a stripe that it can leave
    behind, because stripe and pages are revocable. Otherwise it waits until the stripe's own limit.
    """

    backend = "striped"
    settings_class = StripedSettings
    field, kind = "stripes", "stripe"

    def __init__(
        self,
        stripes: Mapping[str, HiCacheStorage],
        settings: StripedSettings,
        *,
        read_only: bool = False,
        labels: Labels | None = None,
    ) -> None:
        """Take over open storages by name. `labels` say by which names pages are placed in them."""
        super().__init__(stripes, settings, read_only=read_only)
        if settings.allows_longer_calls(settings.stripes):
            self.narrow(bounded=False)
        self._labels = labels or Labels([*stripes])
        shares = settings.shares()
        self._shares = {
            name: shares.get(placed, shares[name]) for name, placed in self._labels.names.items()
        }
        """The weight of each stripe by its name in the config. It goes with the label."""
        self._placement = Placement(
            {placed: self._shares[name] for name, placed in self._labels.names.items()}
        )

    @classmethod
    def _open(cls, config: Mapping[str, Any], *, read_only: bool) -> Self:
        settings = StripedSettings.parse(cls.backend, config)
        labels = Labels([stripe.name for stripe in settings.stripes])
        stripes = Opening(cls, settings, read_only=read_only, labels=labels).run()
        return cls(stripes, settings, read_only=read_only, labels=labels)

    def parts(self) -> Mapping[str, HiCacheStorage]:
        return {name: UnlabelledStorage(part) for name, part in super().parts().items()}

    def diagnose(self) -> list[Diagnosis]:
        """Return what `ComposedStorage` does, and which stripes have other names in their labels."""
        advice = (
            "its pages stay hits; to put it right, exchange the paths in the config, or the mounts"
        )
        return [
            *super().diagnose(),
            *(
                Diagnosis(f"{name}: {LABEL}", fact, advice)
                for name, fact in self._labels.facts.items()
            ),
        ]

    def page_shares(self) -> Mapping[str, float]:
        self.ensure_open()
        total = sum(self._shares.values())
        return {name: share / total for name, share in self._shares.items()}

    def page_parts(self, space: KeySpace, hashes: Sequence[str]) -> list[Collection[str]]:  # noqa: ARG002
        self.ensure_open()
        return [(self._members[stripe].name,) for stripe in map(self._placement.stripe_of, hashes)]

    # --- pages -----------------------------------------------------------------------------------

    def batch_exists(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        def begin(member: Member, own: Sequence[int]) -> PendingCall[list[bool]]:
            return member.begin_exists(space, [hashes[n] for n in own])

        def ask(member: Member, own: Sequence[int]) -> list[bool]:
            return member.exists(space, [hashes[n] for n in own])

        return self._spread(hashes, begin, ask)

    def batch_get(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        def begin(member: Member, own: Sequence[int]) -> PendingCall[list[bool]]:
            return member.begin_get(space, [hashes[n] for n in own], [pages[n] for n in own])

        def ask(member: Member, own: Sequence[int]) -> list[bool]:
            return member.get(space, [hashes[n] for n in own], [pages[n] for n in own])

        return self._spread(hashes, begin, ask, pages)

    def batch_set(
        self, space: KeySpace, hashes: Sequence[str], pages: Sequence[Page]
    ) -> list[bool]:
        def begin(member: Member, own: Sequence[int]) -> PendingCall[list[bool]]:
            return member.begin_set(space, [hashes[n] for n in own], [pages[n] for n in own])

        def ask(member: Member, own: Sequence[int]) -> list[bool]:
            return member.set(space, [hashes[n] for n in own], [pages[n] for n in own])

        def doubt(member: Member, own: Sequence[int], write: Future[list[bool]] | None) -> None:
            member.doubt(space, [hashes[n] for n in own], write)

        return self._spread(hashes, begin, ask, pages, doubt)

    def batch_delete(self, space: KeySpace, hashes: Sequence[str]) -> list[bool]:
        def begin(member: Member, own: Sequence[int]) -> PendingCall[list[bool]]:
            return member.begin_delete(space, [hashes[n] for n in own])

        def ask(member: Member, own: Sequence[int]) -> list[bool]:
            return member.delete(space, [hashes[n] for n in own])

        return self._spread(hashes, begin, ask)

    # --- listings --------------------------------------------------------------------------------

    def page_times(self, space: KeySpace, hashes: Sequence[str]) -> list[PageTimes]:
        """Return the times that the stripe of each page recorded."""
        self.ensure_open()
        times = [PageTimes()] * len(hashes)
        for index, own in self._placement.split(hashes).items():
            member = self._members[index]
            with self._named(member):
                found = member.storage.page_times(space, [hashes[n] for n in own])
            for n, one in zip(own, found, strict=True):
                times[n] = one
        return times

    def clear(self, space: KeySpace) -> int:
        self.ensure_open()
        self._refuse_doubtful(space.id)
        return sum(self._clear_members(lambda storage: storage.clear(space)))

    def remove_space(self, space_id: str) -> int:
        self.ensure_open()
        self._refuse_doubtful(space_id)
        removed = self._clear_members(lambda storage: storage.remove_space(space_id))
        for member in self._members:
            member.forget_space(space_id)
        return sum(removed)

    # --- parts -----------------------------------------------------------------------------------

    def _spaces(self) -> Iterator[KeySpace]:
        return (space for space in super()._spaces() if not is_label(space))

    def _refuse_doubtful(self, space_id: str) -> None:
        """Raise if a write that a caller has left behind may store pages after their removal."""
        pages = sum(member.doubtful_writes(space_id) for member in self._members)
        if pages:
            raise StorageTimeout(
                f"striped: writes of {counted(pages, 'page')} are still under way, and nothing was"
                " removed: try again"
            )

    def _spread(
        self,
        hashes: Sequence[str],
        begin: Callable[[Member, Sequence[int]], PendingCall[list[bool]]],
        ask: Callable[[Member, Sequence[int]], list[bool]],
        pages: Sequence[Page] = (),
        doubt: Callable[[Member, Sequence[int], Future[list[bool]] | None], None] | None = None,
    ) -> list[bool]:
        """Ask the stripe of each page, all at the same time. Return the answers in order.

        One that cannot be left behind is asked in this thread, because the call waits for it anyway. The
        pages of a stripe that fails have no answer, as long as another stripe of the storage works.

        Raises:
            Exception: No stripe works. It is the first one's error.
        """
        self.ensure_open()
        split = self._placement.split(hashes)
        errors: list[Exception] = []
        answers: list[bool | None] = [None] * len(hashes)
        may_leave = all(page.revocable is not None for page in pages)

        def can_leave(member: Member) -> bool:
            return not pages or (may_leave and member.storage.capabilities.revocable)

        held = next((index for index in split if not can_leave(self._members[index])), None)
        calls: list[tuple[Member, list[int], PendingCall[list[bool]] | None]] = []
        try:
            for index, own in split.items():
                if index != held:
                    with noting(errors):
                        member = self._members[index]
                        calls.append((member, own, begin(member, own)))
            if held is not None:
                calls.insert(0, (self._members[held], split[held], None))
            for member, own, call in calls:
                with noting(errors):
                    try:
                        found = (
                            call.result(may_leave=can_leave(member)) if call else ask(member, own)
                        )
                    except BaseException:
                        if doubt is not None:
                            doubt(member, own, call.future if call else None)
                        raise
                    unanswered = unanswered_in(found)
                    for at, (n, answer) in enumerate(zip(own, found, strict=True)):
                        answers[n] = None if at in unanswered else answer
        finally:  # after an interrupt, calls are left that nobody has waited for
            begun = [(member, call.future) for member, _, call in calls if call]
            wait([one for member, one in begun if not (one.cancel() or can_leave(member))])
        if not self._works_without(split):
            self._require_an_answer(errors, len(split))
        return answers_of(answers)

    def _works_without(self, stripes: Container[int]) -> bool:
        """Return True if another stripe has not failed lately."""
        others = (one for index, one in enumerate(self._members) if index not in stripes)
        return any(member.state == "closed" for member in others)
