"""Upstream's own hooks run on the files of each patch; nothing is cloned for them."""

from __future__ import annotations

from pathlib import Path

from scripts import upstream_hooks

CONFIG = """\
exclude: ^copied/
repos:
- repo: local
  hooks:
  - {id: no-four, entry: python tools/no_four.py, types: [python], exclude: _old}
  - {id: of-docs, entry: python tools/no_four.py, types: [python], files: ^docs/}
  - {id: mypy, entry: python tools/no_four.py --slow, types_or: [python, pyi]}
  - {id: shell, entry: tools/other.sh, types: [python]}
- repo: file:///nowhere
  hooks: [{id: far}]
"""
NO_FOUR = """\
import sys
bad = [name for name in sys.argv[1:] if "--" not in name and "4" in open(name).read()]
print(*(f"\\033[91m{name}: four\\033[0m" for name in bad), sep="\\n")
sys.exit(bool(bad))
"""


def test_scripts_of_upstreams_tree_say_what_they_find(tmp_path: Path) -> None:
    tree = tmp_path / "a tree"
    for folder in "tools", "copied":
        (tree / folder).mkdir(parents=True)
    (tree / ".pre-commit-config.yaml").write_text(CONFIG)
    (tree / "tools/no_four.py").write_text(NO_FOUR)
    files = ["a.py", "a_old.py", "b.py", "c.md", "copied/d.py"]
    for name in files:
        (tree / name).write_text("x = 5\n" if name == "b.py" else "x = 4\n")
    hooks = tmp_path / "hooks"
    assert upstream_hooks.run(tree, files, hooks) == ["no-four: a.py: four"]
    slow = upstream_hooks.run(tree, files, hooks, slow=True)
    assert slow == ["mypy: a.py: four", "mypy: a_old.py: four"]
    assert upstream_hooks.run(tree, ["b.py"], hooks) == []
    (environment,) = hooks.iterdir()
    assert (environment / "bin/python").exists()


def test_release_without_hooks(tmp_path: Path) -> None:
    assert upstream_hooks.run(tmp_path, ["a.py"], tmp_path) == []
