"""Topics built alone: their needs come with them, and nothing else."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.version import Version

from scripts.release import Base, releases
from scripts.size import FILE as CODE
from scripts.size import changed, size
from scripts.size import told as size_of_series
from scripts.topics import (
    ALL,
    FILE,
    THREAD,
    load,
    members,
    sets,
    threads,
    upstream,
    with_needs,
)
from scripts.topics_page import FRONT, PAGE, front, page, stated
from tests.tools.installed import ARCH, Installed
from tests.tools.project import PLAN, ROOT, SOURCES, Project

ADDS = {
    "vllm__budget_py": SOURCES["vllm/budget.py"] + "\n\ndef spare():\n    return 1\n"
}
USES = {"vllm__gone_py": "from vllm.budget import spare\n\nUNUSED = spare()\n"}
TOLD = """\
[topic.add-spare]
[topic.use-spare]
needs = {add-spare = "uses `spare`"}
[topic.plan-e]
[topic.plan-f]
beside = ["plan-e"]
"""


@pytest.fixture
def topics(project: Project) -> Project:
    """Four topics: one uses a name of the first, the last has lines next to the
    third's."""
    project.ok("source")
    project.commit("[Core] Add spare", **ADDS)
    project.commit("[Core] Use spare", **USES)
    project.commit("[Core] Plan e", vllm__plan_py=PLAN.replace("e = 1", "e = 2"))
    both = PLAN.replace("e = 1", "e = 2").replace("f = 1", "f = 2")
    project.commit("[Core] Plan f", vllm__plan_py=both)
    project.ok("export")
    tell(project, TOLD)
    return project


def tell(project: Project, text: str) -> None:
    (project.root / FILE).write_text(text)


def wheel(project: Project, *arguments: str) -> Path:
    project.ok("build_wheel", *arguments)
    (path,) = (project.root / "dist").glob("*.whl")
    return path


def test_wheel_of_chosen_topics_has_what_they_need(topics: Project) -> None:
    shown = topics.ok("build_wheel", "--topics", "use-spare")
    assert shown.endswith("patches:\n  add-spare\n  use-spare\n")
    (path,) = (topics.root / "dist").glob("*.whl")
    assert re.match(r"vllm-1\.2\.3\+envelope\.2\.t[0-9a-f]{8}-", path.name)
    topics.ok("verify", "--topics", "use-spare", str(path))
    error = topics.fails("verify", str(path))
    assert f"{path.name} is the wheel of chosen patches" in error
    assert "'make overlay'" in topics.fails("image", "--topics", "use-spare")


def test_as_many_others_are_another_version(topics: Project) -> None:
    first, second = (
        wheel(topics, "--topics", asked).name for asked in ("use-spare", "plan-f")
    )
    assert first != second
    whole = topics.wheel(ARCH).name
    assert wheel(topics).name == whole
    assert wheel(topics, "--topics", "plan-f use-spare.patch").name == whole


def test_status_names_the_topics(
    topics: Project, make: Callable[..., Installed]
) -> None:
    official = make()
    for script in ("build_wheel", "overlay"):
        topics.ok(script, "--topics", "use-spare")
    (official.overlay,) = (topics.root / "dist").glob("*.pyz")
    official.ok("install")
    assert official.ok("status").endswith("patches add-spare use-spare\n")
    official.ok("revert")


SETS = """\
[set.spare]
for = "who spares"
topics = ["use-spare"]
costs = "none found"
cures = {}
[set.plan]
for = "who plans"
topics = ["plan-e"]
costs = "none found"
cures = {}
[topic.use-spare.effect_needs]
plan-e = "else nothing is spared"
"""


def test_set_is_closed_over_what_its_cure_relies_on(
    topics: Project, make: Callable[..., Installed]
) -> None:
    tell(topics, TOLD + SETS)
    shown = topics.ok("build_wheel", "--set", "spare")
    assert shown.endswith("set spare:\n  add-spare\n  use-spare\n  plan-e\n")
    (path,) = (topics.root / "dist").glob("*.whl")
    assert re.match(r"vllm-1\.2\.3\+envelope\.spare\.3\.g[0-9a-f]{8}-", path.name)
    topics.ok("verify", "--set", "spare", str(path))
    error = topics.fails("verify", str(path))
    assert f"{path.name} is the wheel of set spare: 'make verify SET=spare'." in error
    official = make()
    topics.ok("overlay", "--set", "spare")
    (official.overlay,) = (topics.root / "dist").glob("*.pyz")
    official.ok("install")
    said = ", set spare, patches add-spare use-spare plan-e\n"
    assert official.ok("status").endswith(said)
    official.ok("revert")
    # A name that is normal already: no installer writes it in another way.
    version = path.name.split("-")[1]
    assert str(Version(version)) == version
    assert "one of them chooses" in topics.fails(
        "build_wheel", "--set", "spare", "--topics", "plan-e"
    )
    assert "no set 'other'. They are: spare, plan." in topics.fails(
        "build_wheel", "--set", "other"
    )
    assert wheel(topics, "--set", "all spare").name == wheel(topics).name


def test_union_of_sets(topics: Project) -> None:
    tell(topics, TOLD + SETS.partition("[topic.")[0])
    alone = wheel(topics, "--set", "spare").name
    shown = topics.ok("build_wheel", "--set", "spare plan")
    assert shown.endswith("set plan.spare:\n  add-spare\n  use-spare\n  plan-e\n")
    (path,) = (topics.root / "dist").glob("*.whl")
    assert alone != path.name
    assert re.match(r"vllm-1\.2\.3\+envelope\.plan\.spare\.3\.g[0-9a-f]{8}-", path.name)
    for asked in "plan spare", "plan.spare":
        topics.ok("verify", "--set", asked, str(path))
    assert "'make verify SET=plan.spare'." in topics.fails("verify", str(path))
    assert "no set 'other'" in topics.fails("build_wheel", "--set", "spare other")


def test_unknown_topic_is_refused(topics: Project) -> None:
    for asked, told in {
        "spare": "Nearest: add-spare, use-spare.",
        "plane": "Nearest: plan-e, plan-f.",
        "xyz": "patches/README.md lists all.",
    }.items():
        error = topics.fails("build_wheel", "--topics", asked)
        assert error == f"error: no patch '{asked}'. {told}\n"


def test_topics_that_do_not_apply_without_others(topics: Project) -> None:
    tell(topics, TOLD.replace('beside = ["plan-e"]', ""))
    error = topics.fails("build_wheel", "--topics", "plan-f")
    assert "plan-f conflicts in vllm/plan.py" in error
    assert not list((topics.root / "dist").glob("*"))


def alone(project: Project) -> tuple[int, str]:
    done = project.run("check", "--alone", "--no-tests")
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def test_needs_of_topics_are_enough(topics: Project) -> None:
    assert alone(topics) == (
        0,
        "".join(
            f"{name}.patch: ok\n"
            for name in ("add-spare", "use-spare", "plan-e", "plan-f")
        ),
    )


def test_name_of_a_topic_that_is_not_needed(topics: Project) -> None:
    tell(topics, TOLD.replace('needs = {add-spare = "uses `spare`"}', ""))
    code, shown = alone(topics)
    assert code == 1
    wanted = "vllm/gone.py:1: spare is of add-spare, not among its needs (topics.toml)"
    assert f"use-spare.patch: \n  {wanted}\n" in shown


def test_neighbour_that_is_not_told(topics: Project) -> None:
    tell(topics, TOLD.replace('beside = ["plan-e"]', ""))
    code, shown = alone(topics)
    assert code == 1
    wanted = "plan-f conflicts in vllm/plan.py; it applies with plan-e, too"
    assert wanted in shown and "add-spare" not in shown.partition(wanted)[2]


# Of this project's own file.
NEWEST = Base.load(ROOT, releases(ROOT)[0])
SERIES = [patch.stem for patch in NEWEST.patches()]
TOPICS, THREADS = load(ROOT), threads(ROOT)


def links(text: str) -> set[str]:
    pattern = r"https://github\.com/[\w/-]+/(?:issues|pull)/\d+"
    return set(re.findall(pattern, text))


@pytest.mark.parametrize(("name", "made"), [(PAGE, page), (FRONT, front)])
def test_page_is_what_the_file_says(
    name: str, made: Callable[[Path, str], str]
) -> None:
    text = (ROOT / name).read_text()
    assert made(ROOT, text) == text, "make topics-page"


def test_core_stays_small() -> None:
    patches = [NEWEST.folder / f"{n}.patch" for n in members(ROOT, SERIES, "core")]
    assert len(patches) <= 11
    assert size(patches)[0] <= 1100


def test_size_of_the_series_is_counted_as_git_does() -> None:
    patches = list(NEWEST.patches())
    shown = subprocess.check_output(
        ["git", "apply", "--numstat", *patches], cwd=ROOT, text=True
    )
    rows = [row.split("\t") for row in shown.splitlines()]
    code = [row for row in rows if CODE.match(f"diff --git a/{row[2]} ")]
    added, removed = (sum(int(row[at]) for row in code) for at in (0, 1))
    assert (added, removed) == size(patches)
    largest = max(changed(patch)[0] for patch in patches)
    text = size_of_series(ROOT)
    assert text.startswith(f"{len(patches)} patches add {added:,} lines and remove ")
    assert f"in {len({row[2] for row in code})} files" in text
    assert f"(+{largest:,})" in text


def test_each_patch_is_in_a_set() -> None:
    known = [name for name in sets(ROOT) if name != ALL]
    alone = {name: set(members(ROOT, SERIES, name)) for name in known}
    assert set().union(*alone.values()) == set(SERIES)
    assert alone["core"] < alone["shared"], "the table says so"
    both = members(ROOT, SERIES, "core sleep")
    assert set(both) == alone["core"] | alone["sleep"]
    assert both == sorted(both, key=SERIES.index)


def test_topic_is_proposed_once_and_after_its_needs() -> None:
    order = upstream(ROOT).order
    assert sorted(order) == sorted(SERIES)
    for name, topic in TOPICS.items():
        for need in topic.needs:
            assert order.index(need) < order.index(name), name
        proposed = not topic.told["upstream"].startswith("not proposed yet")
        assert proposed == ("forwarded" in topic.told), name


def test_set_has_no_other_name() -> None:
    """Letters alone: the version has it between dots."""
    assert all(re.fullmatch("[a-z]+", name) for name in sets(ROOT))


def test_each_thread_is_told_where_it_matters() -> None:
    """Each listed thread is named, and each named one is listed, by one address."""
    told = tomllib.loads((ROOT / FILE).read_text())["topic"]
    named = set(re.findall(THREAD, str(told)))
    assert named == THREADS.keys()
    assert all(thread.looked for thread in THREADS.values())


def test_symptoms_have_no_thread_that_the_file_lacks() -> None:
    """The row of a topic has only its own issues, and each topic has a row."""
    known = {thread.url for thread in THREADS.values()}
    text = (ROOT / "docs/symptoms.md").read_text()
    assert links((ROOT / "README.md").read_text()) | links(text) <= known
    assert [name for name in SERIES if f"/{name}.patch)" not in text] == []
    for row in text.splitlines():
        rows = {n for n in SERIES if f"{n}.patch" in row}
        if row.startswith("|") and rows:
            told = str([TOPICS[name].told for name in rows])
            own = {THREADS[t].url for t in re.findall(THREAD, told)}
            assert links(row) <= own, row


def test_message_names_no_thread_that_the_file_lacks() -> None:
    for patch in NEWEST.patches():
        text = patch.read_text(errors="replace").partition("\n---\n")[0]
        said = set(re.findall(r"(?<![\w/-])#\d{4,}", text.partition("\n\n")[2]))
        told = str(TOPICS[patch.stem].told)
        assert {one for one in said if not re.search(rf"{one}\b", told)} == set(), patch


def test_needs_are_topics_before() -> None:
    for name, topic in TOPICS.items():
        before = SERIES[: SERIES.index(name)]
        assert {*topic.needs, *topic.beside} <= set(before), name
        assert topic.effect_needs.keys() <= set(SERIES) - {name}, name
        assert not set(topic.needs) & set(topic.beside), name
        assert with_needs(ROOT, SERIES, [name])[-1] == name


def test_state_is_told_once() -> None:
    text = "#44866 does, #44866 (wholly) too, after #50779 (in part)"
    assert stated(text, THREADS) == (
        "#44866 (open) does, #44866 (wholly) too, after #50779 (closed; in part)"
    )
