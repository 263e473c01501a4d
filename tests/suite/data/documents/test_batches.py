"""Mini-batches of rows: the next token as label, each row once an epoch, and the same whatever R is."""

import pytest
import torch

from suite.data.documents.batches import RowBatches
from suite.data.documents.prepare import prepare_documents
from suite.errors import SettingError
from suite.settings import DocumentSettings, DocumentTrainSettings
from tests.suite.data.batches import assert_parts, joined
from tests.suite.data.documents.writing import write_folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    root = tmp_path_factory.mktemp("rows")
    settings = DocumentSettings(corpus=str(write_folder(root / "text")), vocabulary=300, length=32)
    return prepare_documents(settings, root / "cache", lambda _: None), settings


def batches(text, replicas=1, micro_batches=3, **train):
    return RowBatches(*text, DocumentTrainSettings(batch_sequences=7, **train), replicas, micro_batches)


def test_labels_are_the_next_tokens_and_an_epoch_has_every_row_once(text):
    data, _ = text
    rows = (len(data.train) - 1) // 32
    made, seen = batches(text), []
    for step in range(-(-rows // 7)):
        batch = made.batch(step, 0)
        ids, labels = joined(batch)
        assert batch.divisor == 7 * 32
        assert [len(part) for (part,) in batch.inputs] == [3, 2, 2]
        for row, own, following in zip(made.rows(step), ids, labels, strict=True):
            assert own.tolist() == data.train[32 * row : 32 * row + 32].tolist()
            assert following.tolist() == data.train[32 * row + 1 : 32 * row + 33].tolist()
        seen += made.rows(step)
    assert sorted(seen[:rows]) == list(range(rows))
    assert seen[:rows] != sorted(seen[:rows])


def test_a_mini_batch_depends_on_seed_and_step_and_not_on_replicas(text):
    alone = joined(batches(text, micro_batches=4).batch(5, 0))
    halves = batches(text, replicas=2, micro_batches=2)
    pair = [halves.batch(5, replica) for replica in range(2)]
    assert [part.offset for part in pair] == [0, 2]
    for at in range(2):
        assert torch.equal(torch.cat([joined(part)[at] for part in pair]), alone[at])
    assert batches(text, seed=1).rows(5) != batches(text).rows(5)
    with pytest.raises(SettingError, match="batch_sequences=7 is too small for 8 replicas"):
        batches(text, replicas=8)


def test_held_out_rows_are_all_or_some_spread_over_the_split(text):
    data, _ = text
    held_out = data.splits["valid"]
    rows = (len(held_out) - 1) // 32
    everything = torch.cat([joined(batch)[0] for batch in batches(text).held_out()])
    assert everything.flatten().tolist() == held_out[: 32 * rows].tolist()
    some = torch.cat([joined(batch)[0] for batch in batches(text, valid_sequences=3).held_out()])
    assert torch.equal(some, everything[[0, rows // 3, 2 * rows // 3]])


def test_a_stage_gets_only_what_it_uses(text):
    made = batches(text, replicas=2)
    for read in (lambda *which: [made.batch(3, 1, *which)], lambda *which: made.held_out(*which)):
        for parts in zip(read(True, True), read(True, False), read(False, True), strict=True):
            assert_parts(*parts)


def test_held_out_ids_are_the_inputs_and_the_last_label(text):
    for made in (batches(text), batches(text, valid_sequences=3)):
        ids, labels = (torch.cat(parts) for parts in zip(*map(joined, made.held_out()), strict=True))
        assert made.held_out_ids().tolist() == torch.cat((ids, labels[:, -1:]), dim=1).tolist()
