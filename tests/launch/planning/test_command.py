"""``gpipe plan`` refuses what no run could begin with, and finds the fastest settings."""

import json
import re

import pytest
from rich.console import Console

from launch.planning.command import print_plan
from suite.errors import DataError


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("t12_400m", "text.corpus=./missing"),
        ("t12_400m", "text.corpus=~/missing"),
        ("transformer_13", "text.corpus=missing/documents"),
        ("amoebanet_fashion", "images.source=/missing/images"),
        ("amoebanet_18x208", "images.source=./missing"),
    ],
)
def test_a_folder_that_does_not_exist_is_refused_before_planning(name, setting):
    with pytest.raises(DataError, match=setting.partition("=")[2]):
        print_plan(name, "4xH100", "auto", setting, "text", False, Console())


def test_the_fastest_settings_are_a_plan_a_table_and_what_to_type(capsys):
    asked = "transformer_1", "2xH100", "auto", "pipeline.replicas=1"
    print_plan(*asked, "text", True, Console(width=200))
    printed = capsys.readouterr().out
    assert "\nplan of transformer_1 on 2 H100" in "\n" + printed
    (settings,) = re.findall(r'the settings of the first: --set "(.*)"', printed)
    assert "pipeline.replicas=1" in settings
    print_plan(*asked, "json", True, Console())
    records = json.loads(capsys.readouterr().out)
    table = printed.partition("the fastest plans of transformer_1")[2].splitlines()[2:-1]
    assert [row.split()[:3] for row in table] == [[str(record[name]) for name in "KRM"] for record in records]
    assert records[0]["settings"]
    assert set(records[0]["settings"].split()) <= set(settings.split())
    assert [record["step_s"] for record in records] == sorted(record["step_s"] for record in records)
