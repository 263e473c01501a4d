"""The line of a step: every figure, in as many columns as there are."""

import pytest

from launch.tracking.step_line import WIDTH, figures, fitted, headed

VALUES = {
    "step": 300, "train/loss": 4.2134, "train/grad_norm": 0.8712, "train/lr": 4.2e-4, "train/applied": 1.0,
    "train/tokens": 1e6, "throughput/step_s": 0.1, "throughput/tokens_per_s": 1234.5,
    "throughput/tokens_per_s_per_device": 617.2, "throughput/tflops_per_device": 0.0213, "throughput/mfu": 0.291,
    "throughput/hfu": 0.3525, "memory/peak_gib": 1.2345,
}  # fmt: skip


def step_line(values, steps, unit, width=WIDTH):
    return headed(values["step"], steps, figures(values, steps, unit), width)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            {},
            "step 300/1000  loss 4.213  grad 0.871  lr 0.00042  1,234 tokens/s  617/device  21.3 GFLOP/s  MFU 29.1%  "
            "HFU 35.2%  1.23 GiB  1:10 left",
        ),
        ({"train/loss": None, "train/grad_norm": None}, "loss not finite  grad not finite"),
        ({"throughput/tflops_per_device": 412.3}, "412 TFLOP/s"),
        ({"throughput/step_s": 60.0}, "11:40:00 left"),
        ({"throughput/hfu": VALUES["throughput/mfu"]}, "MFU 29.1%  1.23 GiB"),  # nothing was recomputed
    ],
)
def test_all_figures_of_a_step_with_room_for_them(changed, expected):
    assert expected in step_line(VALUES | changed, 1000, "tokens", width=200)


def test_a_line_has_a_hundred_columns_at_most_and_leaves_out_the_least_important_first():
    line = step_line(VALUES, 1000, "tokens")
    assert 90 < len(line) <= 100
    assert "HFU" not in line
    for part in ("loss 4.213", "1,234 tokens/s", "MFU 29.1%", "1.23 GiB", "1:10 left"):
        assert part in line
    assert fitted(figures(VALUES, 1000, "tokens"), 40) == "loss 4.213  1,234 tokens/s  1:10 left"
    assert fitted(figures(VALUES, 1000, "tokens"), 1) == "loss 4.213"


def test_no_figure_is_made_up():
    alone = {"step": 3, "train/loss": 2.0, "throughput/rows_per_s": 10.0, "throughput/rows_per_s_per_device": 10.0}
    assert step_line(alone, 4, "rows") == "step 3/4  loss 2.000  10 rows/s  0:00 left"
