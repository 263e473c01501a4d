"""Mini-batches of one's own data: every row once an epoch, the same for any number of replicas, wrong ones refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from experiments.custom.batches import RowBatches
from experiments.custom.loss import SummedLoss, units_of
from suite import TrainSpec
from suite.errors import DataError, SettingError


def spec(train, loss=None, **others):
    return TrainSpec(layers=[nn.Linear(1, 2)], loss=loss or nn.CrossEntropyLoss(), train=train, **others)


def numbers(count):
    return [(torch.tensor([float(row)]), row % 2) for row in range(count)]


@given(st.integers(1, 20), st.integers(1, 9), st.integers(1, 3), st.integers(1, 4))
def test_every_row_comes_once_an_epoch_whatever_the_replicas(rows, batch, replicas, micro_batches):
    batches = RowBatches(spec(numbers(rows)), batch, seed=3)
    seen = []
    for step in range(rows):
        shares = [batches.share(step, replica, replicas, micro_batches) for replica in range(replicas)]
        parts = [part for share in shares for (part,) in share.inputs]
        assert [share.offset for share in shares] == [sum(map(len, shares[:at])) for at in range(replicas)]
        assert {share.weight for share in shares} == {float(batch)}
        whole = torch.cat(parts).flatten().tolist()
        assert whole == batches.whole(step)[0][0].flatten().tolist()
        seen += whole
    for epoch in range(batch):
        assert sorted(seen[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def test_a_function_makes_the_batches_of_its_steps():
    batches = RowBatches(spec(lambda step: (torch.full((3, 1), float(step)), torch.zeros(3, dtype=torch.long))), 99, 0)
    assert batches.share(5, 0, 1, 2).inputs[0][0].tolist() == [[5.0], [5.0]]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.ones(3, 1), r"step 0 must be a pair \(inputs, targets\); it is a Tensor"),
        ((torch.ones(3), torch.ones(3), torch.ones(3)), r"must be a pair \(inputs, targets\); it is a tuple of 3"),
        ((torch.ones(3, 1), torch.ones(4)), r"differ in rows: \(3, 1\), \(4,\); the first axis of all must be equal"),
        ((torch.ones(0, 1), torch.ones(0)), "step 0 has no inputs"),
        (((torch.ones(3), "text"), torch.ones(3)), "inputs of step 0 must be tensors with rows; one is a str"),
    ],
)
def test_a_wrong_mini_batch_is_refused(batch, message):
    with pytest.raises(DataError, match=message):
        RowBatches(spec(lambda step: batch), 3, 0).whole(0)


def test_an_exception_of_the_data_names_the_rows():
    class Broken:
        def __len__(self):
            return 4

        def __getitem__(self, row):
            raise OSError(f"no file of row {row}")

    with pytest.raises(DataError, match=r"the mini-batch of rows .* cannot be read: OSError: no file of row"):
        RowBatches(spec(Broken()), 2, 0).whole(0)


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


def test_a_metric_is_a_mean_as_the_loss_is():
    own = spec(numbers(2), metric=lambda scores, labels: (scores.argmax(1) == labels).double().mean())
    objective, metric = SummedLoss(own, targets=1)(SCORES, SCORES.argmax(1))
    assert metric == 7
    assert not metric.requires_grad
    assert objective.dim() == 0


def test_a_loss_of_each_row_is_refused():
    with pytest.raises(SettingError, match='returns one number a row; use reduction="mean" or reduction="sum"'):
        SummedLoss(spec(numbers(2), nn.CrossEntropyLoss(reduction="none")), targets=1)


def test_a_mini_batch_whose_targets_are_all_ignored_is_refused():
    ignored = (torch.ones(2, 1), torch.tensor([-100, -100]))
    with pytest.raises(DataError, match="no units to take the mean over: all its targets are ignored"):
        RowBatches(spec(lambda step: ignored), 2, 0).share(0, 0, 1, 1)
