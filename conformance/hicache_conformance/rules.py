"""The rules of the storage contract as data, for tests, reports, messages and docs.

The numbers are stable. A rule may be added or retired, but never gets another number or another
meaning.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from hicache_storage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

SPEC = "1.4"
"""The version of the rules in this kit."""

FAMILIES = {
    "0": "Basics",
    "1": "Key spaces",
    "2": "Batches",
    "3": "Lifecycle and errors",
    "4": "Persistence and crash",
    "5": "Concurrency",
    "6": "Compositions",
    "9": "Declarations",
}


class Level(enum.StrEnum):
    """How much a rule weighs."""

    CORE = "core"
    """A rule for every store. If no core rule ran, the run decides nothing."""
    EXTENDED = "extended"
    """A rule about a capability, or one whose test needs more than the interface. It binds too."""
    PROVISIONAL = "provisional"
    """A rule on trial: reports show it, but it counts in the verdict only with `--strict`."""


class Need(enum.StrEnum):
    """A claim that a rule is about, or something that its test needs."""

    DURABLE = "durability >= CRASH"
    SYNCED = "durability POWER"
    SHARED = "shared"
    ENUMERABLE = "enumerable"
    PARALLEL = "parallelism > 1"
    BOUNDED = "bounded"
    REVOCABLE = "revocable"
    COMPOSES = "compose"
    PEEK = "peek"
    TAMPER = "tamper"
    SERVER = "server"
    STALL = "stall"
    CUT_POWER = "cut_power"
    ENDPOINT = "an address in the config"


CLAIMS = frozenset(
    {
        Need.DURABLE,
        Need.SYNCED,
        Need.SHARED,
        Need.ENUMERABLE,
        Need.PARALLEL,
        Need.BOUNDED,
        Need.REVOCABLE,
        Need.COMPOSES,
    }
)
"""The needs that a store declares. Without them a rule is `not_declared`. All others are back doors.

A store declares `compose` by its test class: `Subject.compose`.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """One numbered rule of the contract."""

    id: str
    title: str
    statement: str
    """The rule as the contract states it."""
    consequence: str
    """What happens to users of a store that breaks the rule."""
    level: Level = Level.CORE
    needs: tuple[Need, ...] = ()
    since: str = "1.0"

    @property
    def family(self) -> str:
        return FAMILIES[self.id[3]]


_CORE, _EXTENDED = Level.CORE, Level.EXTENDED
_COMPOSES = (Need.COMPOSES,)

RULES: dict[str, Rule] = {
    rule.id: rule
    for rule in (
        Rule(
            "KV-001",
            "A fresh key space is empty",
            "A fresh key space is empty. Reading a key space that was not opened is a miss, and"
            " creates nothing that `spaces()` lists.",
            "A new model or a new version of it is served with pages that it never wrote.",
        ),
        Rule(
            "KV-002",
            "What was set is there",
            "`batch_set` True ⇒ from then on `batch_exists` True and `batch_get` True with the"
            " same bytes, until the page is deleted, cleared or (where `retention` allows it)"
            " evicted.",
            "The cache costs writes and gives no hits.",
        ),
        Rule(
            "KV-003",
            "A hit is exactly the bytes that were set",
            "`batch_get` True ⇒ the page holds exactly the bytes that were set under that (space,"
            " hash): never torn, mixed, shorter, longer, shifted, zero-filled, or another key's."
            " Everything else is a miss.",
            "The model attends to a wrong prefix: plausible, silently wrong answers.",
        ),
        Rule(
            "KV-004",
            "A miss is False and touches nothing else",
            "A miss is False, not an exception. After False the page's own bytes are undefined; no"
            " byte outside it changes.",
            "A miss overwrites the pages of other requests, or kills the thread that prefetches.",
        ),
        Rule(
            "KV-005",
            "Setting a present page succeeds and leaves it whole",
            "Setting a present page returns True and leaves it readable with either the old or the"
            " new bytes, whole.",
            "Pages that many requests share vanish or tear whenever one of them writes.",
        ),
        Rule(
            "KV-006",
            "A failed set never shows",
            "`batch_set` False ⇒ that write never becomes visible later.",
            "Target and draft pages that were given up together come back apart.",
        ),
        Rule(
            "KV-007",
            "Deleted is gone, and can be set again",
            "After a `batch_delete` that returned True, exists and get are False, and the page"
            " can be set again. Deleting an absent page returns True. False means that the store"
            " could not remove the page, which may still be there.",
            "A corrupt page can't be healed, and is fetched forever.",
        ),
        Rule(
            "KV-008",
            "Every page size and every segmentation",
            "Any page size works, from 1 byte to `max_page_nbytes` (odd sizes included; 64 MiB is"
            " tried where there is no limit), and so do scatter/gather pages of 1 to 512 segments."
            " What was set in one segmentation is read back in any other.",
            "The store works with the model that it was tried with, and breaks with the next.",
        ),
        Rule(
            "KV-009",
            "A store that has room takes pages",
            "A store that has room accepts pages: of 1,000 sets into an idle, empty store it"
            " refuses none, unless `retention` is BEST_EFFORT. A store refuses a set because it is"
            " full, lost a race or is in trouble, and `stats()` counts refusals by reason."
            " Whenever a set returns False, in any check, the kit looks for the page afterwards"
            " (KV-006).",
            "Pages are lost one by one, nobody knows why, and every prefix ends at the first gap.",
            since="1.1",
        ),
        Rule(
            "KV-010",
            "The times of a page are its own",
            "`page_times` returns one item per hash, in order: without times for an absent page,"
            " and with seconds since 1970 or None for a present one. A page that was just set"
            " counts as just written and used. A get advances `used_at_s`, once `used_within_s` has"
            " passed; asking for times does not count as a use.",
            "`hicache gc --unused-for` removes pages that are in use.",
            _EXTENDED,
            since="1.2",
        ),
        Rule(
            "KV-101",
            "Key spaces that differ in any field are apart",
            "Two key spaces that differ in any one field never see each other's pages. Tried field by"
            " field.",
            "KV of another dtype, layout, rank or tenant is a hit.",
        ),
        Rule(
            "KV-102",
            "Target and draft pages of one hash coexist",
            "Target and draft pages of one hash coexist, with different sizes, in one storage.",
            "Speculative decoding reads the target's KV as the draft's, or loses one of them.",
        ),
        Rule(
            "KV-103",
            "Clear removes its own key space and nothing else",
            "`clear(space)` removes all of that space's pages, or raises (it never returns a"
            " partial count), and it removes nothing else: other spaces, and other programs' data"
            " in the same directory, bucket or database, survive.",
            "Clearing one model's cache deletes other teams' caches, or files that are no cache.",
            _EXTENDED,
        ),
        Rule(
            "KV-104",
            "Listings are exact",
            "`spaces()` and `scan()` list exactly what is there, in a store of 10,000 pages, while"
            " others write. A space that was opened but holds no page may be listed.",
            "Clean-up misses pages that then fill the store, or counts what is not there.",
            _EXTENDED,
            (Need.ENUMERABLE,),
        ),
        Rule(
            "KV-105",
            "Any model name works, and none aliases another",
            "Model names with `/`, `-`, `..`, spaces, non-ASCII and 300 characters work, and none"
            " aliases another.",
            "`org/a-b` is served `org-a/b`'s pages, or a long model path turns the cache off.",
        ),
        Rule(
            "KV-106",
            "Sharded pools are apart, replicated ones shared",
            "N ranks with sharded pools never share a page; N ranks with a replicated pool (heads"
            " None) share all of them.",
            "Ranks read each other's heads, or each stores its own copy of the same bytes.",
        ),
        Rule(
            "KV-201",
            "Results have the length, the order and the type of the contract",
            "Results have the length and order of the hashes, are `bool`, and an empty batch gives"
            " `[]`.",
            "The caller takes one page's verdict for another's.",
        ),
        Rule(
            "KV-202",
            "Each item of a batch stands for itself",
            "Each item has its own verdict: a missing, failed or refused middle item changes no other"
            " item's result or bytes.",
            "One missing page shifts its successors into other pages' memory.",
        ),
        Rule(
            "KV-203",
            "Duplicates in a batch are each answered",
            "Duplicate hashes in one batch are each answered.",
            "Two requests with one prefix in a batch: one of them gets no pages, or no answer.",
        ),
        Rule(
            "KV-204",
            "Large batches work, with few round trips",
            "An exists of 10,000 pages works, and so do a get and a set of `max_batch` pages;"
            " round trips grow with `ceil(n / max_batch)`, not with n (counted, not timed).",
            "Long prompts are cut off silently, or looking one up takes longer than computing it.",
        ),
        Rule(
            "KV-205",
            "Buffers are borrowed for the call only",
            "`batch_set` keeps no reference to the pages after it returns, and `batch_get` writes"
            " to none of them afterwards, even if it raised or timed out.",
            "Host memory that now belongs to another request is overwritten, or stored as the first's.",
        ),
        Rule(
            "KV-206",
            "A digest is that of the bytes",
            "If `batch_get` leaves a `Page.digest`, it is the xxh3-64 of the bytes that the page"
            " holds behind `digest_skip`.",
            "The page store believes it: right pages are deleted as corrupt, or flipped bits are hits.",
            _EXTENDED,
            since="1.2",
        ),
        Rule(
            "KV-301",
            "Close is final, idempotent and complete",
            "`close()` twice is fine; any other call afterwards raises `StorageClosed`. Close joins its"
            " threads within 10 s and leaves no thread, socket, file descriptor or temporary file"
            " behind.",
            "A detached store goes on working in the background, or crashes the process at exit.",
        ),
        Rule(
            "KV-302",
            "Opening and closing leaks nothing",
            "Open, use, close, 50 times over: no growth in threads, descriptors or resident memory.",
            "Servers that attach and detach storage run out of descriptors or memory.",
        ),
        Rule(
            "KV-303",
            "A wrong config is refused by name, without its secrets",
            "A wrong config raises `ConfigError` naming the field, at `from_config`; unknown fields are"
            " errors; secrets never appear in messages, `repr` or logs.",
            "A misspelt option is ignored in production; a password ends in a log.",
        ),
        Rule(
            "KV-304",
            "An unreachable or silent store is an error in time",
            "A store that cannot be reached raises `StorageUnavailable`, within the configured"
            " `timeout_s` plus a second; one that accepts and never answers raises `StorageTimeout` in"
            " the same time. Nothing hangs. The limit holds for a call as a whole, whatever steps it"
            " takes (name look-up, every address, sentinels, locks), and a signal does not restart it.",
            "One dead cache server hangs a fleet of inference servers.",
            _EXTENDED,
            (Need.ENDPOINT,),
        ),
        Rule(
            "KV-305",
            "It recovers by itself",
            "After the store comes back the same instance works again, without a restart: it uses"
            " no broken connection, and takes no reply to an earlier request for the reply to a"
            " later one.",
            "After a blip of the network the cache stays off, or serves one request's pages to"
            " another.",
            _EXTENDED,
            (Need.ENDPOINT,),
        ),
        Rule(
            "KV-306",
            "It is a guest in the process",
            "The storage installs no signal handlers, works in a child that was forked while it"
            " was open, or refuses there, can be constructed off the main thread, and works after"
            " `spawn`.",
            "The server no longer stops on SIGTERM, or the store can't be opened where engines open it.",
        ),
        Rule(
            "KV-307",
            "A full store refuses, stays readable and recovers",
            "A full store (ENOSPC, quota, maxmemory) returns False for that page, stays readable,"
            " and recovers when there is room again.",
            "A full disk turns into exceptions in the engine, or into torn pages.",
            _EXTENDED,
        ),
        Rule(
            "KV-308",
            "Looking changes nothing",
            "A store that was opened read-only does not change, at its limits or beyond them: its"
            " pages, times of use and files stay what they were. It creates, evicts, collects and"
            " heals nothing, it finds what is there, and it claims what a storage that writes claims.",
            "A look at a production store with a stale config evicts pages, or makes all of them"
            " equally old.",
            _EXTENDED,
            since="1.2",
        ),
        Rule(
            "KV-309",
            "What was just set or used is not evicted first",
            "If a store evicts pages, those that were just set or read are not the first to go:"
            " they are not all gone while older pages, which nobody has read since, are all there.",
            "Each new prefix evicts the one before it: the cache is full of old pages, and gives no"
            " hits.",
            _EXTENDED,
            since="1.4",
        ),
        Rule(
            "KV-401",
            "Durable pages survive SIGKILL",
            "`durability >= CRASH`: pages whose set returned True survive SIGKILL and reopening.",
            "A crash loses the cache that was bought to survive it.",
            _EXTENDED,
            (Need.DURABLE,),
        ),
        Rule(
            "KV-402",
            "A killed writer leaves a page absent or whole",
            "A writer killed at any byte of a set leaves the page absent or whole, and leaves nothing"
            " that grows forever.",
            "Half-written pages are served after a restart; debris fills the disk crash by crash.",
            _EXTENDED,
        ),
        Rule(
            "KV-403",
            "A truncated, extended or emptied object is a miss and heals",
            "An object truncated, extended or emptied behind the store's back is a miss, and the next"
            " set heals it.",
            "A damaged object is served as a hit, or poisons its prefix forever.",
            _EXTENDED,
        ),
        Rule(
            "KV-404",
            "A flipped bit at rest is a miss, counted, and heals",
            "One flipped bit anywhere at rest is a miss (the page store's checksum), counted as"
            " corrupt, and the next set heals it.",
            "Bit rot reaches the model.",
            _EXTENDED,
        ),
        Rule(
            "KV-405",
            "Synced pages survive a power cut",
            "`durability` POWER: pages whose set returned True survive a power cut, which takes"
            " everything that was written but not synced.",
            "After a power cut the pages are gone that were paid for with slow, synced sets.",
            _EXTENDED,
            (Need.SYNCED,),
            since="1.4",
        ),
        Rule(
            "KV-501",
            "Every method is thread-safe",
            "Every method is thread-safe. Readers during writes, deletes and evictions see whole pages"
            " or misses. One order of the calls explains all answers about a page. If a storage has"
            " several `parts`, an order explains each answer by itself: while a call is under way,"
            " its parts may differ.",
            "Under load, and only there, pages are torn, lost or mixed.",
        ),
        Rule(
            "KV-502",
            "Shared means shared",
            "`shared`: what one process set, another sees; many processes writing one page leave one"
            " whole page.",
            "Ranks and replicas that should share a prefix each compute it again, or tear it.",
            _EXTENDED,
            (Need.SHARED,),
        ),
        Rule(
            "KV-503",
            "What vanishes on the way is a miss",
            "Eviction or deletion between exists and get, or during get, is a miss.",
            "A page that was evicted a moment ago becomes an exception, or half a page.",
        ),
        Rule(
            "KV-504",
            "Concurrent calls proceed",
            "`parallelism = n`: n concurrent calls proceed; one slow page does not block the others'"
            " calls.",
            "One slow object stalls every request on the node.",
            _EXTENDED,
            (Need.PARALLEL,),
        ),
        Rule(
            "KV-601",
            "A member that is down costs its own pages only",
            "A member that is down costs the pages that only it has: the others are hits, and"
            " sets go on. A call raises only if no member that it asked has answered, and then"
            " it does raise. Once the member is back, its pages are hits again.",
            "One dead disk or server turns off the whole cache, or hides that all of it is gone.",
            _EXTENDED,
            _COMPOSES,
            since="1.3",
        ),
        Rule(
            "KV-602",
            "A member that hangs costs time once, and nothing grows",
            "If a member does not answer, each call ends within the time limits of the member"
            " and of the composition, plus a second. A member without a limit is left behind,"
            " unless it is the first or the pages cannot be revoked. From the fourth call on, no"
            " page of another member is lost. Threads and buffers do not grow with the calls.",
            "A hung bucket stalls every request that the local disk could answer, or fills"
            " the memory of the host.",
            _EXTENDED,
            _COMPOSES,
            since="1.3",
        ),
        Rule(
            "KV-603",
            "A set is True only if a member has stored the page",
            "`batch_set` True ⇒ some member has stored the page, also if others are full or"
            " read-only. False ⇒ the page never appears, also if a member's failed write"
            " arrives later.",
            "Pages are counted as stored that nobody has, or refused pages come back apart"
            " from their target.",
            _EXTENDED,
            _COMPOSES,
            since="1.3",
        ),
        Rule(
            "KV-604",
            "A member that lost its pages is filled again",
            "If a member loses all of its pages, each of them is served from another member"
            " or is a miss, and can be set again.",
            "A disk that was replaced stays empty, or the composition swears to pages that"
            " are gone.",
            _EXTENDED,
            _COMPOSES,
            since="1.3",
        ),
        Rule(
            "KV-605",
            "Damage in one member stays there, and heals",
            "A page that is damaged in one member is a hit if another has it whole. It is"
            " never copied to another member, and costs no other member its page; the member"
            " that served it has it whole or not at all afterwards. If nobody has it whole, it"
            " counts as corrupt, and the next set heals it.",
            "One bad disk spreads its damage to the others, or deletes their whole copies.",
            _EXTENDED,
            _COMPOSES,
            since="1.3",
        ),
        Rule(
            "KV-606",
            "Removed is gone from every member, now and later",
            "After a `batch_delete` that returned True, and after `clear` and `remove_space`"
            " returned, no member has the page, and no copy under way brings it back. If a"
            " member did not answer, a delete of a page that it may have is False, and `clear`"
            " and `remove_space` raise.",
            "A tenant's pages come back after they were deleted.",
            _EXTENDED,
            _COMPOSES,
            since="1.3",
        ),
        Rule(
            "KV-607",
            "A listing has each page once, or is an error",
            "`spaces()` and `scan()` list what any member has, each once. If a member cannot be"
            " listed, they raise, and leave nothing out.",
            "Clean-up counts pages twice, or takes a member that is down for an empty one.",
            _EXTENDED,
            _COMPOSES,
            since="1.3",
        ),
        Rule(
            "KV-901",
            "What is declared is true",
            "What is declared passes its rules.",
            "The SDK trusts claims: it skips copies, retries or checks that the store then needs.",
        ),
        Rule(
            "KV-902",
            "What is not declared is refused",
            "What is not declared is refused with `UnsupportedOperation`, not half done.",
            "A tool takes half a listing, or half a deletion, for the whole.",
        ),
        Rule(
            "KV-903",
            "Limits hold, and one past them is refused",
            "Limits hold at the limit, and one past it is refused cleanly.",
            "A page or a batch that is one too large is cut off, or takes the store down.",
        ),
    )
}


def selected(patterns: Sequence[str] = (), spec: str = SPEC) -> list[Rule]:
    """Return the rules of version `spec` that match any of `patterns` ("KV-1*"), or all rules.

    Raises:
        ConfigError: A pattern matches no rule, or this kit does not have the version.
    """
    known = {rule.since for rule in RULES.values()} | {SPEC}
    if spec not in known:
        raise ConfigError(f"--spec {spec}: this kit has the rules of {', '.join(sorted(known))}")
    rules = [rule for rule in RULES.values() if _version(rule.since) <= _version(spec)]
    for pattern in patterns:
        if not any(fnmatchcase(rule.id, pattern.upper()) for rule in rules):
            raise ConfigError(f"--rules {pattern}: no rule has this number; KV-0* to KV-9* exist")
    wanted = [pattern.upper() for pattern in patterns] or ["*"]
    return [rule for rule in rules if any(fnmatchcase(rule.id, one) for one in wanted)]


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))
