"""The pages Experts and one expert: hostile names, many experts, broken ones, memory as a picture, drift in words."""

import html
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from daemon.dashboard.pages.experts import href
from daemon.line.line import load_catalog
from experts.catalog import read_catalog
from experts.editions.candidates import Candidates, Shadow, write_candidates
from tests.daemon.dashboard.web import STATUS, Web, an_expert, answering_control

HOSTILE = "<img src=x onerror=alert(1)>\"'&amp; ../%2e%2e/{{7*7}}?a=b#c"
NAMES = ("R0402", HOSTILE, "..", "a/b", "/slash/", "Größe µ", "x" * 128, "C0603")
WEIGHTS = "weights.safetensors"


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    """Images of which three experts answered a third each, all surely; C0603 was not sure in training."""
    web = Web(tmp_path_factory.mktemp("experts") / "line")
    for board in range(1, 5):
        web.add_board(board)
    for number in range(1, 301):
        verdict = "fail" if number % 10 == 0 else "review" if number % 7 == 0 else "pass"
        web.add_image(number, number % 4 + 1, verdict)
        load_ms = 9.0 if number % 5 == 0 else 0.0
        expert = ("R0402", HOSTILE, "C0603")[number % 3]
        web.add_stage(number, expert=expert, batch_id=number // 3, load_ms=load_ms, confidence=0.97)
        web.add_stage(number, 1, expert="det", batch_id=number, load_ms=0.0, label=None, confidence=None)
    web.add_version("R0402", origin="<i>")
    web.add_version("old", expert_version="aaaabbbbcccc")
    web.add_review(3, "fail")
    web.add_review(30, "pass")
    for minute in range(3):
        web.sql(
            "INSERT INTO expert_switches (at, executor, device, loaded, evicted, bytes, load_ms, tier, cause)"
            " VALUES (strftime('%Y-%m-%dT%H:%M:%fZ', 'now', :ago),"
            " 'cpu', 'cpu', 'R0402', '[]', 1, 20.0, 'disk', 'demand')",
            ago=f"-{minute} minutes",
        )
    write_catalog(web, R0402={"ok": [0] * 19 + [1000]}, C0603={"ok": [1000] + [0] * 19})
    web.sql("UPDATE stages SET expert_settings = :digest", digest=settings_digest(web))
    with web.running():
        yield web


def write_catalog(web: Web, **confidences: Any) -> None:
    """Entries whose weights cannot be read: the page does not need them."""
    folder = web.folder / "experts"
    folder.mkdir()
    (folder / WEIGHTS).write_bytes(b"not weights")
    entry = {
        "architecture": "resnet18",
        "file": WEIGHTS,
        "classes": ["ok", "bad"],
        "input_size": 64,
        "normalisation": "none",
        "sha256": "abcdefabcdef" + "0" * 52,
    }
    entries = {
        name: entry | ({"confidences": confidences[name]} if name in confidences else {}) for name in (*NAMES, "broken")
    }
    (folder / "catalog.yaml").write_text(yaml.safe_dump({"experts": entries}), encoding="utf-8")


def settings_digest(web: Web) -> str:
    """Return the digest that all entries of the catalog share."""
    catalog = load_catalog(web.folder / "experts" / "catalog.yaml")[0]
    assert catalog is not None
    (digest,) = {spec.settings_digest for spec in catalog.values()}
    return digest


def rows(text: str) -> list[str]:
    listed = text[text.index('id="list-title"') :]
    return [html.unescape(name) for name in re.findall(r'data-row class="cut">([^<]*)</a>', listed)]


def experts(web: Web, *names: str) -> dict[str, Any]:
    return {"experts": [an_expert(name, settings=settings_digest(web)) for name in names]}


def escaped(text: str) -> str:
    return html.escape(text, quote=False).replace('"', "&#34;").replace("'", "&#39;")


@pytest.mark.promise("Access, pages and reviews", "Names of experts are always shown as text, whatever they contain")
def test_names_full_of_html_are_shown_as_they_are_and_each_link_leads_to_its_expert(web: Web) -> None:
    with answering_control(web, experts=experts(web, *NAMES)):
        listing = web.get("/experts")
        assert listing.status == 200
        assert sorted(rows(listing.text)) == sorted(NAMES)
        assert "<img src=x" not in listing.text
        assert "{{7*7}}" in html.unescape(listing.text)
        for name in NAMES:
            assert f'href="{escaped(href(name))}"' in listing.text
            page = web.get(href(name))
            assert page.status == 200, name
            assert escaped(name) in page.text, name
            assert "<img src=x" not in page.text


def test_three_hundred_and_fifty_experts_are_listed_by_the_hundred_worst_first_and_found_by_name(web: Web) -> None:
    many = [an_expert(f"part-{number:03}", resident=["cpu"] if number < 5 else []) for number in range(350)]
    many[333]["failed"] = "its weights file cannot be read"
    with answering_control(web, experts={"experts": many}):
        first = web.get("/experts").text
        assert len(rows(first)) == 100
        assert rows(first)[0] == "part-333"
        for text in ("1 to 100 of 350", "part-333 cannot be loaded", "its weights file cannot be read"):
            assert text in first
        assert len(first) < 400_000
        last = web.get("/experts?sort=name&page=4").text
        assert rows(last) == [f"part-{number:03}" for number in range(300, 350)]
        assert rows(web.get("/experts?q=PART-12&sort=name").text) == [f"part-{number}" for number in range(120, 130)]
        assert len(rows(web.get("/experts?show=resident").text)) == 5
        assert rows(web.get("/experts?show=trouble").text) == ["part-333"]


def test_rates_hit_rate_loads_and_judgements_are_those_of_the_database(web: Web) -> None:
    with answering_control(web, experts=experts(web, "R0402", "det", "unused")):
        few = web.get("/experts?sort=name").text
        page = re.sub(r"\s+", " ", web.get("/experts?sort=name&columns=all").text)
    assert few[few.index("All experts") :].count('<th scope="col"') == 6, "few columns, unless somebody asks for all"
    row = page[page.index('data-row class="cut">R0402') :]
    cells = [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)][:13]
    fails, reviewed = web.sql(
        "SELECT sum(verdict = 'fail'), sum(verdict = 'review') FROM inspections JOIN stages USING (inspection_id)"
        " WHERE expert = 'R0402'"
    )[0]
    assert cells[2:4] == ["0", "1"]  # false calls, those of the last expert of the chain, and escapes
    assert cells[6:10] == ["100", "97.0 %", f"{fails:.1f} %", f"{reviewed:.1f} %"]
    assert cells[12] == "3"  # loads
    assert re.search(r">1</td><td class=.num.>1</td>", page[page.index('data-row class="cut">det') :])
    assert "never used" in page


def test_drift_is_a_grade_in_words_and_an_expert_without_training_distribution_is_said_so(web: Web) -> None:
    with answering_control(web, experts=experts(web, *NAMES)):
        assert "C0603 answers with another confidence than in training" in web.get("/experts").text
        well, drifted, imported = (web.get(href(name)).text for name in ("R0402", "C0603", HOSTILE))
    assert "It answers as it did in training." in well
    assert "other light, another supplier or another camera?" in drifted
    assert "Its confidence in training is not known" in imported
    assert "coserve experts measure" in imported
    assert "0.00: 0.0 %, in training 100.0 %; " in drifted
    assert "0.95: 100.0 %, in training 0.0 %" in drifted
    assert "in training" not in imported[imported.index("Share of answers") : imported.index("Bars are answers now")]


def test_an_expert_that_left_the_catalog_still_has_its_page_and_one_that_never_was_has_none(web: Web) -> None:
    with answering_control(web):
        assert "no longer in the catalog" in web.get("/experts/old").text
        assert web.get("/experts/never-was").status == 404
        assert web.get("/experts/R0402@50e527a8f71d").status == 200, "as memory names a backbone"


def in_memory(name: str, size: int = 100, **more: Any) -> dict[str, Any]:
    return {"expert": name, "bytes": size, "is_loading": False, "is_pinned": False, "is_in_use": False, **more}


def test_the_memory_is_shown_with_the_experts_pinned_in_use_and_loading(web: Web) -> None:
    names = {"A": {"is_in_use": True}, "B": {"is_pinned": True}, HOSTILE: {"is_loading": True}, "D": {}}
    pool = {"pool": "cpu", "device": "cpu", "used_bytes": 500, "budget_bytes": 1000}
    pool |= {"experts": [in_memory(name, **more) for name, more in names.items()]}
    with answering_control(web, memory={"pools": [pool]}):
        page = re.sub(r"\s+", " ", web.get("/experts").text)
    assert "4 experts, 500 B of 1 kB used, 500 B free" in page
    table = re.findall(
        r"<tr><td class=\"mono\">cpu</td><th[^>]*>(.*?)</th><td class=\"num\">(.*?)</td><td>(.*?)</td>", page
    )
    states = {re.sub(r"<[^>]+>", "", name): (size, state) for name, size, state in table}
    assert states["A"] == ("100", "in use")
    assert states["B"] == ("100", "resident, pinned")
    assert states["D"] == ("100", "resident")
    assert states["free"][0] == "500"
    assert "held by a load that hangs" in page
    assert "<img src=x" not in page


def test_a_version_in_shadow_is_compared_on_the_page_of_its_expert_with_links_to_the_images(web: Web) -> None:
    catalog = web.folder / "experts" / "catalog.yaml"
    other = read_catalog(catalog)["R0402"].model_copy(update={"file": "", "sha256": "feedfeedfeed" + "0" * 52})
    put = Candidates().put("R0402", "feedfeedfeed", other, "new", None)
    for asked, holds in (({"images": 2, "agreement": 0.0}, True), ({"images": 9, "agreement": 0.98}, False)):
        shadow = Shadow.model_validate({"version": "feedfeedfeed"} | asked)
        write_candidates(catalog, put.shadowed("R0402", shadow, None))
        for inspection, outcome in ((3, "pass"), (6, "fail <b>D1</b>")):  # people failed image 3
            web.sql(
                "INSERT OR IGNORE INTO shadow_answers"
                " VALUES (:id, 'R0402', 'feedfeedfeed', 0, 'ok', 1, :new, 'pass', 1)",
                id=inspection,
                new=outcome,
            )
        shadows = [
            {"expert": "R0402", "problem": "its process ended: killed by SIGKILL"},
            {"expert": "det", "problem": "x"},
        ]
        with answering_control(web, experts=experts(web, "R0402"), status={**STATUS, "shadows": shadows}):
            page = re.sub(r"\s+", " ", web.get("/experts/R0402").text)
        assert "It does not answer: its process ended: killed by SIGKILL." in page
        assert ("coserve experts promote R0402 feedfeedfeed" in page) == holds
        assert ("It holds: 2 of 2 images" in page) == holds
        assert ("It does not hold yet: 2 of 9 images" in page) == (not holds)
        assert "fail &lt;b&gt;D1&lt;/b&gt;" in page
        assert '<a href="/boards/3?inspection=6">6</a>' in page
        assert "Of 1 reviewed image: 0 false calls that would go" in page
    catalog.with_name("candidates.json").unlink()
    with answering_control(web, experts=experts(web, "R0402")):
        assert "shadow-title" not in web.get("/experts/R0402").text


def test_a_backbone_that_cannot_be_loaded_is_one_cause_for_all_of_its_heads(web: Web) -> None:
    why = {"failed": "expert line@50e527a8f71d: /w.safetensors: no such file", "backbone": "line@50e527a8f71d"}
    heads = [an_expert(f"part-{number}", **why) for number in range(3)]
    with answering_control(web, experts={"experts": heads}):
        line, listing = web.get("/").text, web.get("/experts").text
    assert line.count("<strong>line@50e527a8f71d cannot be loaded: /w.safetensors: no such file<") == 1
    assert listing.count("<strong>line@50e527a8f71d cannot be loaded<") == 1
    assert "part-0 cannot be loaded" not in line + listing
