"""A page is one file; its figures take the page's text colour, so that they are legible on light and dark."""

import re

from experiments.report import figure as figures
from experiments.report.page import Page, Picture, Section
from experiments.report.table import Table


def picture():
    figure, axis = figures.new_figure("step", "loss")
    axis.plot([1, 2, 3], [3.0, 2.0, 1.0], label="a run")
    axis.axhline(2.5, color=figures.INK)
    axis.legend(frameon=False)
    return Picture("loss", figure, "The loss.")


def test_text_and_axes_of_a_figure_take_the_colour_of_the_page():
    svg = figures.svg(picture().figure)
    assert svg.startswith("<svg")
    assert all(f">{text}</text>" in svg for text in ("step", "loss", "a run"))  # text, not outlines
    colours = set(re.findall(r"(?:fill|stroke): ([^;\"]+)", svg)) - {"none"}
    assert colours == {"currentColor", figures.COLOURS[0]}


def test_values_are_escaped_and_figures_are_not():
    table = Table("t", "a < b", ("name", "value"), [["<b>", 1.0]], [])
    page = Page("x < y", [Section("s", ["<p>"], [table], [picture()], [("<i>", "<pre>")], [("<a>", "f")])]).html()
    for text in ("x &lt; y", "a &lt; b", "&lt;b&gt;", "<p>&lt;p&gt;</p>", "&lt;i&gt;", "&lt;pre&gt;", "&lt;a&gt;"):
        assert text in page
    assert page.count("<svg") == 1


def test_an_empty_section_is_left_out():
    page = Page("x", [Section("nothing"), Section("some", ["thing"])])
    assert "nothing" not in page.html()
    assert "nothing" not in page.markdown()


def test_a_bar_in_a_cell_does_not_end_it_in_markdown():
    assert r"| a \| b | 1 |" in Table("t", "t", ("name", "value"), [["a | b", 1.0]], []).markdown()


def test_markdown_has_its_pictures_beside_it(tmp_path):
    Page("x", [Section("s", pictures=[picture()])]).write(tmp_path)
    assert "![The loss.](report-loss.png)" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "report-loss.png").read_bytes().startswith(b"\x89PNG")
