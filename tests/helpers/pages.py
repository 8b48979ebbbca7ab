"""The documentation's fenced blocks, so that tests run what it shows."""

import re

from processes import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
LAUNCHERS = (ROOT / "docs" / "launchers.md").read_text(encoding="utf-8")


def blocks(language, page=README):
    """Of a language, in order."""
    return [text for found, text in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.M | re.S) if found == language]


def block_with(text, language="sh", page=README):
    (block,) = [block for block in blocks(language, page) if text in block]
    return block


def output_of(command):
    """Lines that the README shows behind a command: the block that follows it."""
    behind = README.partition("```sh\n%s\n```\n" % command)[2]
    assert behind, "README.md has no block with %r alone" % command
    return blocks("", behind)[0].splitlines()
