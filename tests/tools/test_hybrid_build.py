"""The page's figures for building a hybrid's metadata are those of its table."""

from __future__ import annotations

from tests.tools.project import ROOT

TABLE = ROOT / "docs/data/hybrid-build.md"


def test_the_page_says_what_the_table_has() -> None:
    lines = [line for line in TABLE.read_text().splitlines() if line[:2] == "| "]
    names, _, *rows = ([cell.strip() for cell in x[1:-1].split("|")] for x in lines)
    found = [dict(zip(names, row, strict=True)) for row in rows]
    page = " ".join((ROOT / "docs/fragmentation.md").read_text().split())
    for kernels, text in {
        "triton": "times stock's CPU time with Triton's gated delta nets",
        "flashinfer": "times with FlashInfer's",
        "mamba2": "times with Mamba2",
    }.items():
        ratios = [float(row["ratio"]) for row in found if row["kernels"] == kernels]
        assert len(ratios) == 3
        assert f"{min(ratios):.1f} to {max(ratios):.1f} {text}" in page
    launches = max(
        int(row["launches, ours"]) / int(row["launches, release"]) for row in found
    )
    assert f"up to {launches:.0f} times as many kernels" in page
