import pytest

from tests.faults.trial import Trials


@pytest.fixture(scope="module")
def trials(tmp_path_factory):
    return Trials(tmp_path_factory.mktemp("faults"))
