"""What a run was made with: versions, device, commit, date."""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ncdwf import __version__
from ncdwf.config import Config
from ncdwf.learning.loop import choose_device
from ncdwf.storage import sha256


def environment(config: Config) -> dict[str, Any]:
    """Return versions, device, commit and date, as plain values."""
    device = choose_device(config.device)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "ncdwf": __version__,
        "commit": source_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": f"{device.type} ({card})",
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def in_brief() -> str:
    """Return date, device, torch version and commit in one line, to head a record with."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    commit = source_commit() or "unknown"
    return f"{datetime.now(UTC):%Y-%m-%d}, {card}, torch {torch.__version__}, commit `{commit}`"


def source_commit() -> str | None:
    """Return the commit of this source tree; `NCDWF_COMMIT` wins.

    A `+` is behind it if files of the package differ. Results and documents may: they are what
    runs write.
    """
    if told := os.environ.get("NCDWF_COMMIT"):
        return told
    here = Path(__file__).parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(here), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):  # installed into somebody else's repository
            return None
        changed = git("status", "--porcelain", "--", str(here.parent))
        return git("rev-parse", "--short=9", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return None


def source_sum() -> str:
    """Return a sha256 over the modules of this package, which tells code apart without git."""
    package = Path(__file__).parent.parent
    modules = sorted(package.rglob("*.py"))
    sums = {str(path.relative_to(package)): sha256(path.read_bytes()) for path in modules}
    return sha256(json.dumps(sums).encode())
