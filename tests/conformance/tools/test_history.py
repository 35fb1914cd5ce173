from __future__ import annotations

import threading

import pytest
from hicache_conformance.tools.observation.linearizability import History, Operation, explain


def test_a_history_records_answers_in_time() -> None:
    history = History()
    with history.recording(process=1, kind="set", value=7) as call:
        call.record_answer(True)
    with history.recording(process=2, kind="get") as call:
        call.record_answer(True, 7)

    assert [
        Operation(1, 0, 1, "set", 7, outcome=True),
        Operation(2, 2, 3, "get", 7, outcome=True),
    ] == history.operations()


def test_calls_that_raise_have_no_answer() -> None:
    history = History()
    with pytest.raises(TimeoutError), history.recording(process=1, kind="set", value=7):
        raise TimeoutError

    assert [Operation(1, 0, None, "set", 7)] == history.operations()


def test_calls_that_still_run_are_part_of_a_history() -> None:
    history = History()
    with history.recording(process=1, kind="set", value=7) as call:
        call.record_answer(True)

        assert [Operation(1, 0, None, "set", 7)] == history.operations()


def test_threads_record_into_one_history() -> None:
    history, lock, stored = History(), threading.Lock(), dict[str, int]()

    def work(process: int) -> None:
        for turn in range(20):
            with history.recording(process=process, kind="set", value=100 * process + turn) as call:
                with lock:
                    stored["page"] = 100 * process + turn
                call.record_answer(True)
            with history.recording(process=process, kind="get") as call, lock:
                call.record_answer(True, stored["page"])

    threads = [threading.Thread(target=work, args=(process,)) for process in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    operations = history.operations()

    assert 160 == len(operations)
    times = [each.invoked for each in operations] + [each.returned or 0 for each in operations]
    assert sorted(times) == list(range(320))
    assert explain(operations) is None
