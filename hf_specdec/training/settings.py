"""What an interrupted run was begun with, so that it goes on with nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_settings(file: Path, settings: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings, indent=1), encoding="utf-8")


def changed_settings(file: Path, settings: dict[str, Any]) -> str:
    """Which settings differ from those in the file, as text; empty if none does."""
    before = json.loads(file.read_text(encoding="utf-8"))
    return "; ".join(
        f"`{name}` was {before.get(name)!r} and is {settings.get(name)!r}"
        for name in before | settings
        if before.get(name) != settings.get(name)
    )
