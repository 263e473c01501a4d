import pytest

from tests.slow.trial import Trials


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    return Trials(tmp_path_factory.mktemp("faults"))
