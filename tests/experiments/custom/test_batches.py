"""Mini-batches of a TrainSpec: every row once an epoch, the same for any number of replicas, and errors."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from experiments.custom.batches import SpecBatches
from experiments.custom.layer_check import find_refusal
from experiments.custom.loss import SummedLoss, units_of
from suite import TrainSpec
from suite.errors import DataError, SettingError


def spec(train, loss=None, **others):
    return TrainSpec(layers=[nn.Linear(1, 2)], loss=loss or nn.CrossEntropyLoss(), train=train, **others)


def numbers(count):
    return [(torch.tensor([float(row)]), row % 2) for row in range(count)]


@settings(max_examples=40)
@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 3), st.integers(1, 4))
def test_every_row_comes_once_an_epoch_whatever_the_replicas(rows, batch, replicas, micro_batches):
    batches = SpecBatches(spec(numbers(rows)), batch, seed=3)
    seen = []
    for step in range(rows):
        shares = [batches.batch(step, replica, replicas, micro_batches) for replica in range(replicas)]
        parts = [part for share in shares for (part,) in share.inputs]
        assert [share.offset for share in shares] == [sum(map(len, shares[:at])) for at in range(replicas)]
        assert {share.divisor for share in shares} == {float(batch)}
        whole = torch.cat(parts).flatten().tolist()
        assert whole == batches.whole(step)[0][0].flatten().tolist()
        seen += whole
    for epoch in range(batch):
        assert sorted(seen[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def test_a_function_makes_the_batches_of_its_steps():
    batches = SpecBatches(spec(lambda step: (torch.full((3, 1), float(step)), torch.zeros(3, dtype=torch.long))), 99, 0)
    assert batches.batch(5, 0, 1, 2).inputs[0][0].tolist() == [[5.0], [5.0]]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.ones(3, 1), r"step 1 must be a pair \(inputs, targets\); it is a Tensor"),
        ((torch.ones(3), torch.ones(3), torch.ones(3)), r"must be a pair \(inputs, targets\); it is a tuple of 3"),
        ((torch.ones(3, 1), torch.ones(4)), r"differ in rows: \(3, 1\), \(4,\); the first axis of all must be equal"),
        ((torch.ones(0, 1), torch.ones(0)), "step 1 has no inputs"),
        (((torch.ones(3), "text"), torch.ones(3)), "inputs of step 1 must be tensors with rows; one is a str"),
    ],
)
def test_a_wrong_mini_batch_is_refused(batch, message):
    with pytest.raises(DataError, match=message):
        SpecBatches(spec(lambda step: batch), 3, 0).whole(0)


def test_an_exception_of_the_data_names_the_rows():
    class Broken:
        def __len__(self):
            return 4

        def __getitem__(self, row):
            raise OSError(f"no file of row {row}")

    with pytest.raises(DataError, match=r"the mini-batch of rows .* cannot be read: OSError: no file of row"):
        SpecBatches(spec(Broken()), 2, 0).whole(0)


LABELS = torch.tensor([0, 2, 1, -100, 2, 2, 0])
SCORES = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("parts", [[7], [3, 3, 1], [3, 1, 1, 2]], ids=str)
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)),
        nn.CrossEntropyLoss(label_smoothing=0.1),
    ],
    ids=str,
)
def test_micro_batches_of_any_sizes_give_torchs_own_mean(loss, parts):
    """One of the parts has an ignored label alone, whose own mean is not a number."""
    own = spec(numbers(2), loss)
    summed = SummedLoss(own, targets=1)
    total = sum(summed(s, t)[0] for s, t in zip(SCORES.split(parts), LABELS.split(parts), strict=True))
    assert float(total / units_of(own, (LABELS,))) == pytest.approx(float(loss(SCORES, LABELS)), rel=1e-14)


def test_a_mean_over_units_of_ones_own():
    def mean_of_tokens(values, counts):
        return (values * counts).sum() / counts.sum()

    own = spec(numbers(2), mean_of_tokens, units=lambda counts: counts.sum())
    values, counts = torch.tensor([1.0, 5.0, 2.0]), torch.tensor([1.0, 2.0, 7.0])
    summed = SummedLoss(own, targets=1)
    total = sum(float(summed(values[part], counts[part])[0]) for part in (slice(2), slice(2, 3)))
    assert total / units_of(own, (counts,)) == pytest.approx(float(mean_of_tokens(values, counts)))


@pytest.mark.parametrize("parts", [[7], [3, 1, 3]], ids=str)
def test_a_metric_is_a_mean_over_the_same_units(parts):
    """One part has an ignored label alone."""

    def counted(scores, labels):
        kept = labels != -100
        return (scores.argmax(1) == labels)[kept].double().mean()

    own = spec(numbers(2), metric=counted)
    summed = SummedLoss(own, targets=1)
    scores = SCORES.clone().requires_grad_()
    sums = [summed(s, t)[1] for s, t in zip(scores.split(parts), LABELS.split(parts), strict=True)]
    assert float(sum(sums) / units_of(own, (LABELS,))) == pytest.approx(float(counted(SCORES, LABELS)))
    assert not any(metric.requires_grad for metric in sums)


def test_several_metrics_are_sums_in_one_tensor_and_others_than_numbers_are_refused():
    own = spec(numbers(2), nn.MSELoss(), metric={"half": lambda scores, labels: 0.5, "error": nn.L1Loss()})
    _, metrics = SummedLoss(own, targets=1)(SCORES, SCORES + 2)
    assert metrics.tolist() == pytest.approx([len(SCORES) / 2, len(SCORES) * 2])
    own = spec(
        numbers(2),
        nn.MSELoss(),
        metric={"half": lambda scores, labels: 0.5, "sums": lambda scores, labels: scores.sum(1)},
    )
    error = find_refusal([], SummedLoss(own, 1), (SCORES,), (SCORES,))
    assert error.startswith("the metric sums returns a tensor of shape (7,); it must be one number")


@pytest.mark.parametrize("metric", [{"loss": abs}, {"top/5": abs}, {1: abs}, {"accuracy": 0.5}])
def test_names_and_functions_of_metrics_are_checked(metric):
    with pytest.raises(SettingError, match=r"write names of letters, digits and _, other than loss, .* with functions"):
        SummedLoss(spec(numbers(2), metric=metric), targets=1)


def test_a_metric_that_counts_is_rounded_as_torchs_own_product():
    hits = torch.tensor(7)
    own = spec(numbers(2), nn.CrossEntropyLoss(), metric=lambda scores, labels: hits, units=lambda labels: 1.7)
    _, metric = SummedLoss(own, targets=1)(SCORES, SCORES.argmax(1))
    assert float(metric) == float(hits * 1.7)


def test_cross_entropy_with_units_of_your_own_is_a_mean_over_these():
    own = spec(numbers(2), nn.CrossEntropyLoss(), units=lambda labels: len(labels))
    labels = LABELS.clamp(min=0)
    total = sum(float(SummedLoss(own, 1)(s, t)[0]) for s, t in zip(SCORES.split(3), labels.split(3), strict=True))
    means = [float(own.loss(s, t)) * len(t) for s, t in zip(SCORES.split(3), labels.split(3), strict=True)]
    assert total == pytest.approx(sum(means))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.Bilinear(3, 3, 1), "has parameters, which would not be trained; move them into the last layer"),
        (nn.CrossEntropyLoss(reduction="none"), 'returns one number a row; use reduction="mean" or reduction="sum"'),
    ],
)
def test_a_loss_with_parameters_or_of_each_row_is_refused(loss, message):
    with pytest.raises(SettingError, match=message):
        SummedLoss(spec(numbers(2), loss), targets=1)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([], "train has no rows"),
        (DataLoader(numbers(3)), "train is a DataLoader; give its dataset, and its batch size as batch_size"),
        (iter([1]), "train is a list_iterator; give a dataset with len"),
    ],
)
def test_what_is_no_dataset_is_refused(train, message):
    with pytest.raises(DataError, match=message):
        SpecBatches(spec(train), 2, 0)


def test_data_may_draw_random_numbers_which_are_the_same_in_every_process():
    def draw(step):
        return torch.randn(3, 1), torch.tensor([random.random() + np.random.rand() for _ in range(3)])

    own = spec(draw)
    first, second = (SpecBatches(own, 3, 0) for _ in range(2))
    torch.manual_seed(9)
    before = torch.get_rng_state()
    whole = first.whole(4)
    assert torch.get_rng_state().equal(before), "dropout draws from this generator"
    torch.randn(5), np.random.rand(5), random.random()
    assert all(one.equal(other) for own, others in zip(whole, second.whole(4), strict=True)
               for one, other in zip(own, others, strict=True))  # fmt: skip
    assert not whole[0][0].equal(first.whole(5)[0][0])
    assert first.digest() == second.digest()


def test_a_mini_batch_whose_targets_are_all_ignored_is_refused():
    ignored = (torch.ones(2, 1), torch.tensor([-100, -100]))
    with pytest.raises(DataError, match="no units to take the mean over: all its targets are ignored"):
        SpecBatches(spec(lambda step: ignored), 2, 0).batch(0, 0, 1, 1)


@pytest.mark.parametrize("count", [0, -1.0, float("nan"), torch.tensor(float("nan"))])
def test_units_of_ones_own_must_be_more_than_nothing(count):
    with pytest.raises(DataError, match=rf"no units to take the mean over: units returned {float(count)}"):
        SpecBatches(spec(numbers(4), units=lambda labels: count), 2, 0).batch(0, 0, 1, 1)


def test_units_must_be_one_number():
    own = spec(numbers(4), units=lambda labels: (labels != 0).float())
    with pytest.raises(SettingError, match=r"units returns a tensor of shape \(2,\); it must be one number: \.sum\(\)"):
        SpecBatches(own, 2, 0).batch(0, 0, 1, 1)


def test_a_stream_without_a_length_is_refused():
    class Stream(list):
        def __len__(self):
            raise TypeError("a stream")

    with pytest.raises(DataError, match=r"len\(\) of train cannot be read: TypeError: a stream"):
        SpecBatches(spec(Stream()), 2, 0)


def test_metrics_count_rows_whatever_the_loss_divides_by():
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 0.5]))
    batches = SpecBatches(spec(numbers(8), weighted), 4, 0)
    batch = batches.batch(0, 1, 2, 1)
    assert batch.divisor == pytest.approx(sum((0.2, 0.5)[label] for label in batches.whole(0)[1][0]))
    assert batch.units == 4


def test_the_first_of_the_held_out_rows_are_evaluated():
    batches = SpecBatches(spec(numbers(2), valid=numbers(9)), 4, 0)
    for most, expected in ((None, range(9)), (6, range(6)), (20, range(9))):
        rows = [float(row) for batch in batches.held_out(2, most) for (part,) in batch.inputs for row in part]
        assert rows == list(expected)


def test_rows_are_read_at_once_where_the_dataset_can():
    class Several(list):
        def __getitems__(self, rows):
            return [self[row] for row in reversed(rows)]

    one, other = (SpecBatches(spec(kind(numbers(5))), 3, 0).whole(0) for kind in (list, Several))
    assert one[0][0].flip(0).equal(other[0][0])


@pytest.mark.parametrize("draw", [lambda: torch.randn(1), lambda: np.random.rand(1), lambda: random.random()])
def test_data_that_draws_random_numbers_is_not_read_in_a_thread(draw):
    def drawing(step):
        draw()
        return torch.ones(2, 1), torch.zeros(2)

    SpecBatches(spec(drawing), 2, 0).check_prefetch()
    with pytest.raises(SettingError, match=r"the data draws random numbers .*: leave prefetch=True out"):
        SpecBatches(spec(drawing, prefetch=True), 2, 0).check_prefetch()


def test_data_that_is_read_in_a_thread_leaves_the_generators_of_layers_alone():
    batches = SpecBatches(spec(numbers(9), prefetch=True, valid=numbers(3)), 4, 0)
    same = SpecBatches(spec(numbers(9)), 4, 0)
    batches.check_prefetch()
    torch.manual_seed(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "manual_seed", None)  # a seed set in a thread would be that of the layers, too
        read = batches.whole(2), batches.held_out(1)[0].inputs[0]
    assert read[0][0][0].equal(same.whole(2)[0][0])
