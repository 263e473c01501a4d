"""The pages and tables of sweeps on text, from hand-made scores."""

from __future__ import annotations

import re

import pytest

from experiments.report.table import readable
from experiments.sweeps.batch_size import batch_table
from experiments.sweeps.members.scales import MODELS
from experiments.sweeps.registry import SWEEPS
from experiments.sweeps.report.figures import against_bilingual
from experiments.sweeps.report.results import read_results
from tests.experiments.sweeps.finished import GOOD, LAPTOP, depth_width, finish, members, words


def test_the_page_is_self_contained_and_has_all_models(tmp_path):
    depth_width(tmp_path, GOOD)
    page = SWEEPS["depth_width"].report("laptop", LAPTOP, tmp_path).page
    html_file, markdown_file = page.write(tmp_path / "out")
    html = html_file.read_text()
    assert html.count("<svg") == 4
    assert not re.search(r'(src|href)="(?!data:|#)', html)
    assert all(name in html for name in MODELS)
    text = markdown_file.read_text()
    pictures = re.findall(r"!\[.*\]\((.*)\)", text)
    assert len(pictures) == 4
    assert all((tmp_path / "out" / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)
    # both directions and three seeds in the mean: 30.2 of the deep one, and its difference from the baselines' 12.2
    assert "30.2 ± 0.5" in text
    assert re.search(r"\+18\.00 ± 0\.\d\d", text)
    assert (
        "Best at the largest number of steps, so more steps could improve them further: t12_400m (3 of 3 runs)" in text
    )
    # 15.1 BLEU in the mean, 0.9 times as much out of English and 1.1 times into it; chrF is twice that
    directions = "5.282 ± 0.045 | 4.678 ± 0.055 | 27.18 ± 0.45 | 33.22 ± 0.55"
    for where in ("high: es, de", "all"):
        scores = f"4.98 ± 0.05 | 30.2 ± 0.5 | 15.1 ± 0.25 | 28.69 ± 0.47 | {directions}"
        assert f"| {where} | t48_1_3b_deep | 3 | {scores} |" in text
    assert "| all | bilingual | 3 | 6.78 ± 0.05 | 12.2 ± 0.5 |" in text
    assert "| all | copying the source | - | - | 26 | 14 | 25 | - | - | 26 | 26 |" in text
    assert "t48_1_3b_deep 34.3" in text  # the paper's BLEU


def test_the_figure_beside_bilingual_models_has_margins(tmp_path):
    depth_width(tmp_path, GOOD)
    results = read_results("laptop", [*members("depth_width"), *members("bilingual", tmp_path)], tmp_path)
    axis = against_bilingual(results)[0].figure.axes[0]
    assert [bar.get_label() for bar in axis.containers] == list(MODELS)
    for bar in axis.containers:
        (segments,) = bar.lines[2]
        heights = [upper[1] - lower[1] for lower, upper in segments.get_segments()]
        # seeds of all models are 0, 0.2 and 0.4 chrF apart: s = 0.2, t(95%, 12) = 2.179
        assert heights == pytest.approx([2 * 2.1788128 * 0.2 * (2 / 3) ** 0.5] * 6)


def test_table_5_has_the_papers_columns(tmp_path):
    for member in members("batch_size"):
        tokens = member.experiment.train.batch_tokens
        finish(tmp_path, member, 10 + tokens / 500 + 0.01 * member.experiment.train.seed)
    table = batch_table(read_results("laptop", members("batch_size"), tmp_path))
    *rows, copied = [dict(zip(table.headings, row, strict=True)) for row in table.rows]
    shown = {heading: value for heading, value in copied.items() if value is not None}
    assert shown == {
        "batch (paper)": "copying the source",
        **{f"{measure}, {kind}": value for kind in ("equal steps", "equal tokens")
           for measure, value in (("chrF", "26"), ("BLEU", "14"))},
    }  # fmt: skip
    assert [row["batch (paper)"] for row in rows] == [260_000, 1_000_000, 4_000_000]
    assert [row["BLEU (paper)"] for row in rows] == [30.92, 31.86, 32.71]
    middle = members("batch_size")[1].experiment.train.batch_tokens
    assert [row["batch (here)"] for row in rows] == [round(0.26 * middle), middle, 4 * middle]
    from_german = 1.1 * (10 + 4 * middle / 500 + 0.01)
    assert rows[2]["BLEU, equal steps"] == f"{readable(from_german)} ± 0.027"
    assert rows[1]["BLEU, equal steps"] == rows[1]["BLEU, equal tokens"]
    result, findings = words(tmp_path, "batch_size")
    assert set(result.values()) == {"confirmed"}
    gain = 2 * 1.1 * (4 * middle - round(0.26 * middle)) / 500  # into English alone
    assert all(row[5].startswith(f"+{gain:.2f} ±") for row in findings.rows)
    text = SWEEPS["batch_size"].report("laptop", LAPTOP, tmp_path).page.markdown()
    assert "15 runs are finished and scored" in text  # the middle batch is one run in both comparisons
