"""The head of a patch file: one author, and DEP-3's fields of its state upstream.

DEP-3 is how Debian's tools read which bug a patch mends, whether it was forwarded, and
when that was last said (https://dep-team.pages.debian.net/deps/dep3/). `git am` skips
the fields, so they are no part of a commit, and exporting writes them anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from scripts import topics
from scripts.series import IDENTITY, export

FROM = re.compile(rb"^From: .*\n(?:[ \t].*\n)*", re.M)


def patch_files(root: Path, tree: Path) -> dict[str, bytes]:
    """The commits of ``tree`` as patch files, by name in order.

    Raises:
        Problem: they cannot be exported, or topics.toml cannot be read.
    """
    known = fields(root)
    return {
        name: with_head(content, known.get(name.removesuffix(".patch"), []))
        for name, content in export(tree).items()
    }


def with_head(patch: bytes, fields: list[str]) -> bytes:
    head, _, body = patch.partition(b"\n\n")
    author = "From: {} <{}>\n".format(*IDENTITY).encode()
    head = FROM.sub(author, head + b"\n", count=1)
    head += "".join(f"{field}\n" for field in fields).encode()
    return head + b"\n" + body


def fields(root: Path) -> dict[str, list[str]]:
    """DEP-3's fields of each topic; none where topics.toml does not speak of
    upstream."""
    updated, known = topics.upstream(root).updated, topics.threads(root)
    found = {}
    for name, topic in topics.load(root).items() if updated else ():
        told = topic.told
        found[name] = [f"Bug: {known[issue].url}" for issue in told["issues"]]
        found[name] += [f"Forwarded: {told.get('forwarded', 'no')}"]
        found[name] += [f"Last-Update: {updated}"]
        if "applied" in told:
            found[name] += [f"Applied-Upstream: {told['applied']}"]
    return found
