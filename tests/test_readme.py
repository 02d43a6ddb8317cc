"""The usage example of README.md runs as it stands there."""

import re
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent


def test_the_usage_example_runs(tmp_path, monkeypatch):
    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(code.strip().splitlines()) <= 15
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(compile(code, "README.md", "exec"), scope)
    y = np.asarray(scope["y"], np.float32)
    assert y.shape == (4, scope["config"].hidden_size)
    assert np.isfinite(y).all()
    assert y.any()


def test_every_page_it_names_exists():
    text = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links
    assert all((ROOT / link).exists() for link in links)
