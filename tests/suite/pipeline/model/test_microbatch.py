"""How a mini-batch is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suite.errors import SettingError
from suite.pipeline.model.microbatch import even_split_sizes, replica_share


@given(st.integers(1, 200), st.integers(1, 50))
def test_sizes_cover_the_mini_batch_evenly_and_none_is_empty(examples, micro_batches):
    parts = even_split_sizes(examples, micro_batches)
    assert sum(parts) == examples
    assert len(parts) == min(examples, micro_batches)
    assert parts == sorted(parts, reverse=True)
    assert min(parts) >= 1
    assert max(parts) - min(parts) <= 1


@given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 9))
def test_each_replica_has_an_equal_part_of_the_micro_batches_and_one_as_far_as_they_go(count, replicas, micro_batches):
    count = min(count, replicas * micro_batches)  # no mini-batch has more
    parts = [replica_share(count, replica, replicas) for replica in range(replicas)]
    assert [at for part in parts for at in range(count)[part]] == list(range(count))
    counts = [part.stop - part.start for part in parts]
    assert max(counts) - min(counts) <= 1
    assert count >= replicas or counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(("examples", "micro_batches"), [(0, 2), (2, 0)])
def test_nothing_cannot_be_cut(examples, micro_batches):
    with pytest.raises(SettingError, match=f"cannot cut {examples} examples into {micro_batches}"):
        even_split_sizes(examples, micro_batches)
