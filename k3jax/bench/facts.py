"""The file that a benchmark writes."""

import dataclasses
import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax


def facts_of(rows: Iterable[Any], bandwidth: float, rest: float) -> dict[str, Any]:
    """Rows, which are dataclass instances, what they were measured on, and the rests between."""
    return {
        "device": jax.devices()[0].device_kind,
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "read_bytes_per_second": bandwidth,
        "rest_seconds": rest,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def write_json(facts: dict[str, Any], file: Path) -> None:
    """Writes the facts, a row a line, so that files can be compared."""
    head = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in facts.items()][:-1]
    rows = ",\n  ".join(json.dumps(row) for row in facts["rows"])
    file.write_text("{" + ",\n ".join([*head, f'"rows": [\n  {rows}\n ]']) + "}\n")
