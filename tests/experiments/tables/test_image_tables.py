"""The tables of AmoebaNet: computed numbers are compared with arithmetic; the simulator replaces measurements."""

import json
import statistics
from itertools import pairwise

import pytest

from experiments.base.cluster import Cluster
from experiments.report.paper import paper_numbers
from experiments.sweeps.transfer import SEEDS, SETS, SWEEP, fine_tuning, transfer_members, transfer_table
from experiments.tables.table1 import amoebanet_costs, columns, fits, largest
from experiments.tables.table2 import SLEEP_S, amoebanet_speeds, heaviest_over_mean, split_layers
from tests.experiments.tables.test_tables import column, cost, exact, silent

LAPTOP = Cluster(2, 2**30, "cpu")
UNEVEN = [cost(1.0, 2.0)] * 9 + [cost(3.0, 4.0)] * 3 + [cost(0.5, 1.0)] * 12


def test_no_cut_of_the_layers_has_a_lighter_heaviest_stage_than_the_plan():
    cells, seconds, _ = split_layers(UNEVEN, stages=4, micro_batches=32, base=32)
    weights = [2 * c.forward_s + c.backward_s for c in UNEVEN]  # each forward is recomputed
    ends = [(i, j, k) for i in range(1, 22) for j in range(i + 1, 23) for k in range(j + 1, 24)]
    lightest = min(max(sum(weights[a:b]) for a, b in pairwise((0, *inner, 24))) for inner in ends)
    assert heaviest_over_mean(seconds) * sum(weights) / 4 == pytest.approx(lightest)
    assert sum(cells) == 24
    assert statistics.fmean(forward for forward, _ in seconds) == pytest.approx(SLEEP_S)


def test_table_2_of_an_even_network_is_the_closed_form():
    measured = []

    def costs(work):
        measured.append((work.name, work.sample().largest.inputs[0].shape))
        return [cost(1.0, 2.0)] * 24

    table = amoebanet_speeds(exact, costs, silent)
    assert measured == [("amoebanet_18x256", (4, 3, 224, 224))]
    speeds = {(row[0], row[1]): row[6] for row in table.rows}
    assert speeds[2, 1] == 1.0
    assert speeds[8, 32] / speeds[2, 32] == pytest.approx(65 / 18.5, rel=0.01)
    assert column(table, "heaviest / mean cell") == pytest.approx([1.0] * 9)
    printed = paper_numbers("table2.amoebanet")["speed"]
    assert [row[8] for row in table.rows] == [speed for row in printed for speed in row]


@pytest.mark.slow
def test_the_papers_networks_fit_its_devices_at_its_bytes_and_twice_as_wide_ones_do_not():
    numbers = paper_numbers("table1.amoebanet")
    limit = numbers["device_gib"] * 2**30
    pipeline = columns("amoebanet", 128)[2][1]
    assert pipeline.stages == numbers["K"][2] == 2
    layers, filters = numbers["L"][2], numbers["D"][2]
    assert fits(amoebanet_costs(layers, filters, 1), pipeline, numbers["bytes_per_parameter"], limit)
    assert not fits(amoebanet_costs(layers, 2 * filters, 1), pipeline, numbers["bytes_per_parameter"], limit)
    assert largest(lambda units: units <= 37) == 37


def test_the_sweep_has_five_runs_per_row_that_differ_only_in_their_initialization(tmp_path):
    runs = transfer_members("", LAPTOP, tmp_path)
    assert len(runs) == 1 + 2 * 2 * 5
    assert len({run.folder for run in runs}) == len(runs)
    assert {run.after for run in runs[1:]} == {None, runs[0].folder}
    assert runs[0].experiment.train.init_from is None
    for source in SETS:
        tuned, scratch = (fine_tuning(source, 3, begin) for begin in (str(tmp_path / "fashion"), None))
        assert tuned.model_copy(update={"train": scratch.train}) == scratch
        train = tuned.train.model_copy(update={"init_from": None})
        assert train == scratch.train
        assert train.seed == 3
        assert not tuned.images.flip


def table_4(runs):
    return transfer_table(SWEEP.results("", LAPTOP, runs))


def test_table_4_has_means_and_deviations_over_the_finished_runs(tmp_path):
    empty = table_4(tmp_path)
    assert empty.rows[0][:2] == ["mnist", None]
    assert "gpipe sweep transfer" in empty.notes[0]
    for seed in SEEDS:
        for start, accuracy in (("pretrained", 0.90), ("scratch", 0.80)):
            folder = tmp_path / "transfer" / f"mnist-{start}-{seed}"
            folder.mkdir(parents=True)
            record = {"valid_accuracy": accuracy + seed / 100, "counts": {"train": 4000, "test": 1000}}
            (folder / "record.json").write_text(json.dumps(record))
    pretrained = tmp_path / "transfer" / "fashion"
    pretrained.mkdir()
    (pretrained / "record.json").write_text(json.dumps({"valid_accuracy": 0.891, "steps": 600}))
    table = table_4(tmp_path)
    row = table.rows[0]
    assert row[:5] == ["mnist", 4000, 1000, 10, "5 and 5"]
    assert row[5] == pytest.approx(92)
    assert row[6] == pytest.approx(statistics.stdev(range(5)))
    assert row[7] == pytest.approx(82)
    assert row[9] == pytest.approx(10)
    assert "89.1% there" in table.notes[0]
    imagenet = next(row for row in table.rows if row[0] == "ImageNet-2012")
    assert imagenet[-2:] == [84.4, 83.9]
