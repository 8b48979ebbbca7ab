"""Every page can be found, and leads where it says: the index names each, and links, anchors and named files exist."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from processes import ROOT

FOLDERS = [folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name.isalnum()]  # no .venv, no *.egg-info
NOT_OURS = {"build", "dist"}
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for folder in FOLDERS if folder.name not in NOT_OURS for page in folder.rglob("*.md"))]
)


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def links(page: Path) -> list:
    """What a page links to or shows, other than by http and mail."""
    text = re.sub(r"`[^`]*`", "", prose(page))
    found = re.findall(r"\]\(([^)\s]+)[^)]*\)", text) + re.findall(r'\b(?:href|src|srcset)="([^"]+)"', text)
    return [link for link in found if not re.match(r"\w+:", link)]


def anchors(page: Path) -> set:
    """As GitHub makes them: of headings, the second of a name with -1; and those in HTML."""
    text, seen, found = prose(page), Counter(), set()
    for heading in re.findall(r"^#+ +(.*?) *$", text, re.M):
        heading = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        found.add("%s-%d" % (anchor, seen[anchor]) if seen[anchor] else anchor)
        seen[anchor] += 1
    return found | set(re.findall(r'\b(?:id|name)="([^"]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_anchors_and_named_files_exist(page):
    for link in links(page):
        target, _, anchor = link.partition("#")
        found = (page.parent / target).resolve() if target else page
        assert found.exists() and ROOT in [found, *found.parents], link
        assert not anchor or anchor in anchors(found), link
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:p3|src|include|docs|tests|examples|tools)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_index_names_every_page_of_the_documentation():
    index = ROOT / "docs" / "README.md"
    named = {(index.parent / link.partition("#")[0]).resolve() for link in links(index)}
    pages = {page.resolve() for page in (ROOT / "docs").glob("*.md")} - {index.resolve()}
    assert pages <= named, "not in docs/README.md: %s" % sorted(page.name for page in pages - named)


def test_links_and_anchors_are_found_as_github_finds_them(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# `p3 run`: a [job](a.md), *twice*\n## Limits\n## Limits\n[out](https://x.org/a) [in](b.md#limits-1)\n"
        '<img src="c.svg"> <a id="here"></a> `d[0](e)`\n```\n# no heading\n[f](g)\n```\n'
    )
    assert links(page) == ["a.md", "b.md#limits-1", "c.svg"]
    assert anchors(page) == {"p3-run-a-job-twice", "limits", "limits-1", "here"}
    assert {ROOT / "README.md", ROOT / "docs" / "torch.md", ROOT / "examples" / "ec2" / "README.md"} <= set(PAGES)
