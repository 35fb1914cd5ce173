from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any, cast

import pytest
from hicache_conformance.report.html import html_report
from hicache_conformance.report.record import Record
from hicache_conformance.run.outcomes import Outcome, Verdict
from report_samples import WAIVER, check_of, conformant, failed, partial, record_of, rule_of

VOID = {"meta", "circle", "path"}
INLINE = {"a", "b", "code", "small", "span", "strong", "time"}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&$verdict ${x} ü"


class Page(HTMLParser):
    """A parser that collects the content of a page, and fails unless the elements nest properly."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.unbalanced: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        self.unbalanced += self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts += [" "] * (tag not in INLINE)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if self._open and self._open[-1] == tag:
            self._open.pop()
        else:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        if self._open[-1:] not in (["style"], ["script"]):
            self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def page(record: Record) -> Page:
    return Page(html_report(record))


def hostile(value: Any, name: str = "") -> Any:
    """Return a dumped record in which every free text tries to inject markup into the page."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {key: hostile(item, key) for key, item in fields.items()}
    if isinstance(value, list):
        return [hostile(item, name) for item in cast("Any", value)]
    fixed = name in ("outcome", "verdict", "started_at")
    return value if fixed or not isinstance(value, str) else f"{value}{HOSTILE}"


def attacked(record: Record) -> Record:
    return Record.model_validate(hostile(record.model_dump(mode="json")))


SAMPLES = {
    "conformant": conformant(),
    "failed": failed(),
    "partial": partial(),
    "attacked": attacked(failed()),
    "empty": record_of(verdict=Verdict.INCONCLUSIVE, reasons=("connection refused",), command=""),
}


@pytest.fixture(params=SAMPLES)
def sample(request: pytest.FixtureRequest) -> Record:
    return SAMPLES[request.param]


def test_elements_are_nested_rightly(sample: Record) -> None:
    assert page(sample).unbalanced == []


def test_nothing_is_loaded_from_elsewhere(sample: Record) -> None:
    text = html_report(sample)
    found = page(sample)

    assert not [attributes for _, attributes in found.elements if "src" in attributes]
    assert not {tag for tag, _ in found.elements} & {"link", "img", "iframe", "object", "base"}
    [style] = re.findall("<style>(.*?)</style>", text, re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style


def test_the_content_policy_allows_the_one_script_and_no_loads(sample: Record) -> None:
    [policy] = [meta["content"] or "" for meta in page(sample).all("meta") if "http-equiv" in meta]
    [script] = re.findall("<script>(.*?)</script>", html_report(sample), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()

    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy


@pytest.mark.parametrize("record", [conformant(), failed(), partial()])
def test_text_of_a_store_is_never_markup(record: Record) -> None:
    found = page(attacked(record))

    assert {tag for tag, _ in page(record).elements} == {tag for tag, _ in found.elements}
    assert len(found.all("script")) == 1
    assert not [attributes for _, attributes in found.elements if "onerror" in attributes]
    assert found.text.count("$verdict ${x}") > 20


def test_links_lead_into_the_page_or_to_the_web(sample: Record) -> None:
    found = page(sample)
    ids = [attributes["id"] for _, attributes in found.elements if attributes.get("id")]

    assert len(ids) == len(set(ids))
    for target in (attributes["href"] or "" for attributes in found.all("a")):
        assert target[1:] in ids if target.startswith("#") else target.startswith("https://")


def test_a_waiver_s_link_that_is_no_web_address_is_no_link() -> None:
    waiver = WAIVER.model_copy(update={"link": "javascript:alert(1)"})
    record = record_of(rule_of("KV-005", Outcome.WAIVED, waiver=waiver))

    assert "javascript:" not in "".join(str(link["href"]) for link in page(record).all("a"))


def test_headings_leave_out_no_level(sample: Record) -> None:
    levels = [int(tag[1]) for tag, _ in page(sample).elements if re.fullmatch("h[1-6]", tag)]

    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(below - above <= 1 for above, below in pairwise(levels))


def test_the_page_has_its_landmarks(sample: Record) -> None:
    tags = [tag for tag, _ in page(sample).elements]

    assert [tags.count(tag) for tag in ("header", "nav", "main", "footer")] == [1, 1, 1, 1]


def test_failed_rules_are_open_and_others_closed() -> None:
    rules = [one for one in page(failed()).all("details") if one.get("id")]

    assert {one["id"]: "open" in one for one in rules} == {
        "KV-001": False,
        "KV-003": True,
        "KV-301": True,
    }


def test_a_failure_shows_everything_that_is_known_of_it() -> None:
    shown = page(failed()).text

    for words in (
        "acme is not conformant",
        "The store breaks 1 of the 3 rules that could be tested.",
        "the 4096 bytes that were set, or a miss",
        r"then <zeros> & \x1b[31mmore",
        "store.batch_get(5feceb66, 6b86b273) -> [True, True]",
        "What it means: The model attends to a wrong prefix",
        "--seed 7 --rules KV-003",
    ):
        assert words in shown


def test_the_run_is_described() -> None:
    shown = page(conformant()).text

    for words in (
        "hicache_acme.storage:AcmeStorage",
        "hicache-acme 2.4.1",
        "Acme 7.2.4, master",
        "21 November 2026, 09:14 UTC",
        "1 min 23 s",
        "*** stands for a secret",
    ):
        assert words in shown


def test_capabilities_are_a_table_of_claims_and_outcomes() -> None:
    shown = page(conformant()).text

    assert "durability KV-401 KV-402 crash refuted" in shown
    assert "alignment 1 not verified" in shown


def test_a_capability_s_rule_that_did_not_run_is_no_link() -> None:
    targets = [attributes["href"] for attributes in page(conformant()).all("a")]

    assert "#KV-502" not in targets


def test_a_waiver_shows_its_reason_its_link_and_its_end() -> None:
    shown = page(partial())

    assert "the server refuses overwrites until 2.5 example.org/issues/12 2027-03-31" in shown.text
    assert {"href": "https://example.org/issues/12"} in shown.all("a")


def test_a_check_not_verified_names_its_remedy() -> None:
    shown = page(conformant()).text

    assert "Open the back door tamper(space, page_hash, data) in a test class" in shown


def test_figures_are_shown() -> None:
    assert "growth of memory in 50 rounds 212 KiB KV-302" in page(conformant()).text


def test_a_run_of_some_rules_warns_the_reader() -> None:
    record = record_of(rule_of("KV-101"), selection=("KV-1*",))

    assert "the verdict is about these alone" in page(record).text


def test_control_characters_never_reach_the_page() -> None:
    check = check_of("KV-001", Outcome.FAILED, got="\x00\x1b\u202e")

    text = html_report(record_of(rule_of("KV-001", Outcome.FAILED, check)))

    assert r"\x00\x1b\u202e" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", text)


def test_a_rule_without_checks_is_shown_as_not_verified() -> None:
    rule = rule_of("KV-402", Outcome.NOT_VERIFIED).model_copy(update={"checks": ()})

    assert "No check of it ran." in page(record_of(rule)).text
