"""Settings in Python: what they do not know they refuse."""

import pytest
from pydantic import ValidationError

from suite import settings


@pytest.mark.parametrize(
    "kind",
    [each for each in vars(settings).values() if isinstance(each, type) and issubclass(each, settings.FrozenRecord)],
)
def test_a_misspelled_setting_is_refused(kind):
    with pytest.raises(ValidationError, match=r"learning_rat\n.*Extra inputs are not permitted"):
        kind.model_validate({"learning_rat": 1.0})
