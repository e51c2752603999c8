"""Pages can be read with a screen reader and used with a keyboard."""

import re
from functools import partial

import pytest

from lineage.report.comparison import target_of, write_page
from lineage.report.run import write_report
from tests.report.sample_runs import text_run, vision_run

PAGES = "vision", "text", "few keys", "many keys"


@pytest.fixture
def pages(runs, tmp_path):
    """Return pages by name: reports of two runs, and comparisons of runs that differ in few and in many keys."""
    compare = partial(write_page, tmp_path / "sweep.html", runs, dict.fromkeys(runs, ""), target_of(runs))
    few = compare().read_text()
    for number, run in enumerate(runs):
        run.config["data"] = {f"key{n}": number for n in range(13)}
        run.changes |= {f"data.key{n}": number for n in range(13)}
    reports = (write_report(write(tmp_path / write.__name__)).read_text() for write in (vision_run, text_run))
    return dict(zip(PAGES, (*reports, few, compare().read_text())))


@pytest.mark.parametrize("name", PAGES)
def test_tables_have_titles_and_named_rows_or_columns(name, pages):
    body = pages[name]
    tables = re.findall("<table.*?</table>", body, re.DOTALL)
    assert tables
    for table in tables:
        assert re.match("<table[^>]*><caption>[^<]+</caption><tr", table)
        heads = re.findall("<th[^>]*>", table)
        assert heads
        assert all(re.search(r"scope=(col|row)", head) for head in heads)
    levels = [int(level) for level in re.findall(r"<h(\d)", body)]
    assert levels == [1, *[2] * (len(levels) - 1)]


@pytest.mark.parametrize("name", PAGES)
def test_ids_are_unique(name, pages):
    ids = re.findall(r"<\w[^>]* id=['\"]?([^'\" >]+)", pages[name])
    assert ids
    assert len(ids) == len({*ids})


@pytest.mark.parametrize("name", PAGES)
def test_wide_tables_can_be_scrolled_by_keyboard(name, pages):
    regions = re.findall("<div class='[^']*scroll[^>]*>(?=<table)", pages[name])
    assert len(regions) == {"vision": 1, "text": 1, "few keys": 1, "many keys": 2}[name]
    assert all(re.search("tabindex=0 role=region aria-label='[^']+'", region) for region in regions)


def test_runs_are_sorted_by_buttons_which_state_the_order(browse, pages):
    shown = browse(pages["few keys"], 'document.querySelectorAll(".runs button")[0].click();')
    assert re.findall(r'<th scope="col"[^>]*aria-sort="(\w+)"[^>]*><button>(\w+)</button>', shown) == [
        ("ascending", "run")
    ]
