"""The sketch of offered pages: what it remembers, for how long, and how often it is wrong."""

from __future__ import annotations

import pytest
from pages import hash_of

from hicache_storage.page_store.sketch import MAX_ERROR, PageSketch

PAGES = 1000


def hashes(start: int, count: int) -> list[str]:
    return [hash_of(number) for number in range(start, start + count)]


@pytest.fixture
def sketch() -> PageSketch:
    return PageSketch(PAGES)


def test_a_page_is_new_once(sketch: PageSketch) -> None:
    assert [False] * 20 == sketch.add(hashes(0, 20))
    assert [True] * 20 + [False] == sketch.add(hashes(0, 21))


def test_groups_have_pages_of_their_own(sketch: PageSketch) -> None:
    sketch.add(hashes(0, 5), "kv")

    assert [False] * 5 == sketch.add(hashes(0, 5), "draft")
    assert [True] * 5 == sketch.add(hashes(0, 5), "kv")


def test_an_empty_batch_is_nothing(sketch: PageSketch) -> None:
    assert [] == sketch.add([])


@pytest.mark.parametrize("batch", [1, 7, 128])
def test_the_last_pages_are_always_remembered(batch: int) -> None:
    sketch = PageSketch(PAGES)
    for start in range(0, 5 * PAGES, batch):
        sketch.add(hashes(start, batch))
    last = -(-5 * PAGES // batch) * batch

    assert all(sketch.add(hashes(last - PAGES + batch, PAGES - batch)))


def test_pages_are_forgotten_after_twice_as_many_others(sketch: PageSketch) -> None:
    sketch.add(hashes(0, 100))
    sketch.add(hashes(1000, 3 * PAGES))

    assert sketch.add(hashes(0, 100)).count(True) < 10


def test_the_error_is_below_its_bound() -> None:
    sketch = PageSketch(20_000)
    for start in range(0, 60_000, 100):
        sketch.add(hashes(start, 100))
    wrong = 0
    for start in range(1_000_000, 1_019_800, 100):
        wrong += sketch.add(hashes(start, 100)).count(True)

    assert wrong / 19_800 < MAX_ERROR


def test_a_million_pages_take_two_and_a_half_megabytes() -> None:
    assert 2_500_000 == PageSketch(1_000_000).nbytes


def test_a_dump_is_a_sketch_again(sketch: PageSketch) -> None:
    sketch.add(hashes(0, PAGES + 300))
    again = PageSketch(PAGES)

    assert 2 == again.restore([sketch.dump(0), sketch.dump(1)])
    assert [sketch.state(0), sketch.state(1)] == [again.state(0), again.state(1)]
    assert all(again.add(hashes(300, PAGES)))


def test_pages_that_were_added_before_a_restore_stay(sketch: PageSketch) -> None:
    sketch.add(hashes(0, PAGES + 300))
    again = PageSketch(PAGES)
    again.add(hashes(9000, 10))
    again.restore([sketch.dump(1), sketch.dump(0)])

    assert all(again.add([*hashes(400, PAGES - 100), *hashes(9000, 10)]))


def test_an_older_dump_of_the_same_filter_adds_nothing(sketch: PageSketch) -> None:
    sketch.add(hashes(0, 10))
    older = sketch.dump(sketch.young)
    sketch.add(hashes(10, 10))
    again = PageSketch(PAGES)

    assert 2 == again.restore([older, sketch.dump(sketch.young)])
    assert (1, 20) == again.state(again.young)


def test_a_dump_that_is_added_again_changes_nothing(sketch: PageSketch) -> None:
    sketch.add(hashes(0, PAGES + 500))
    dumps = [sketch.dump(number) for number in range(2)]
    restored = PageSketch(PAGES)

    for _ in range(3):
        restored.restore(dumps)

    assert dumps == [restored.dump(number) for number in range(2)]


def test_a_dump_from_before_both_filters_is_left_out(sketch: PageSketch) -> None:
    sketch.add(hashes(0, 10))
    ancient = sketch.dump(sketch.young)
    sketch.add(hashes(1000, 3 * PAGES))
    again = PageSketch(PAGES)

    assert 2 == again.restore([ancient, sketch.dump(0), sketch.dump(1)])
    assert again.add(hashes(0, 10)).count(True) < 10


@pytest.mark.parametrize("change", ["size", "short", "magic"])
def test_a_dump_of_another_form_does_not_fit(sketch: PageSketch, change: str) -> None:
    dump = sketch.dump(0)
    other = {"size": PageSketch(2 * PAGES).dump(0), "short": dump[:-1], "magic": b"X" + dump[1:]}

    assert 0 == sketch.restore([other[change]])
