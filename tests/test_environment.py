import re

import pytest
import torch

from ncdwf.results.environment import in_brief


def test_a_record_is_headed_by_date_device_version_and_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCDWF_COMMIT", "0123456789abcdef")
    date, device, version, commit = in_brief().split(", ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
    assert device
    assert version == f"torch {torch.__version__}"
    assert commit == "commit `012345678`"
