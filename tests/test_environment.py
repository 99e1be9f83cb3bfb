import re
import subprocess
from pathlib import Path

import pytest
import torch

from ncdwf.results import environment
from ncdwf.results.environment import in_brief, source_commit, source_sum


def test_a_record_is_headed_by_date_device_version_and_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCDWF_COMMIT", "0123456789abcdef")
    date, device, version, commit = in_brief().split(", ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
    assert device
    assert version == f"torch {torch.__version__}"
    assert commit == "commit `0123456789abcdef`"


def test_the_commit_tells_whether_files_differ_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCDWF_COMMIT", "")  # says nothing
    file = tmp_path / "src" / "results" / "environment.py"
    file.parent.mkdir(parents=True)
    monkeypatch.setattr(environment, "__file__", str(file))
    assert source_commit() is None  # not in a repository

    def git(*words: str) -> None:
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *names, *words], check=True)

    git("init", "--quiet")
    file.write_text("1")
    assert source_commit() is None  # in one that knows nothing of it
    git("add", ".")
    git("commit", "--quiet", "--message=1")
    (tmp_path / "runs.jsonl").write_text("what a run writes is no change of the source")
    assert re.fullmatch("[0-9a-f]{9}", source_commit() or "")
    (tmp_path / "src" / "new.py").write_text("2")
    assert re.fullmatch(r"[0-9a-f]{9}\+", source_commit() or "")


def test_every_change_of_a_module_gives_another_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "results" / "environment.py"
    file.parent.mkdir()
    monkeypatch.setattr(environment, "__file__", str(file))
    file.write_text("1")
    seen = [source_sum()]
    (tmp_path / "results" / "environment.pyc").write_text("what Python leaves beside it")
    assert source_sum() == seen[0]
    file.write_text("2")
    seen.append(source_sum())
    (tmp_path / "new.py").write_text("")
    seen.append(source_sum())
    (tmp_path / "new.py").rename(tmp_path / "newer.py")
    seen.append(source_sum())
    (tmp_path / "newer.py").rename(tmp_path / "results" / "newer.py")
    seen.append(source_sum())
    assert len(set(seen)) == 5
