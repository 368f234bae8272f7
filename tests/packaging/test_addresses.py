"""Tests that the addresses of the project are in one place, ``[project.urls]`` of ``pyproject.toml``."""

import re
import subprocess
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]

#: An address of a repository or a site of this project, wherever it may be.
ADDRESS = re.compile(r"https?://[^\s\"'<>)]*rankless", re.IGNORECASE)


def test_no_other_file_has_one() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    texts = [name for name in listed.stdout.split("\0") if name.endswith((".md", ".yml", ".toml", ".cff", ".py"))]
    assert len(texts) > 500
    found = {name for name in texts if (ROOT / name).exists() and ADDRESS.search((ROOT / name).read_text())}
    assert found <= {"pyproject.toml", "tests/packaging/test_addresses.py"}


def test_the_site_takes_them_from_there() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert set(urls) <= {"Repository", "Documentation", "Changelog", "Issues"}
    site = (ROOT / "mkdocs.yml").read_text()
    assert "site_url" not in site
    assert "repo_url" not in site
    assert "hooks: [docs/hooks.py]" in site
    assert "on_config" in (ROOT / "docs/hooks.py").read_text()


def test_as_long_as_there_is_none_the_readme_says_that_the_project_is_not_published() -> None:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    assert bool(urls) != ("rankless is not on PyPI yet" in (ROOT / "README.md").read_text())


def test_the_workflow_publishes_what_make_dist_has_tried() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text())["jobs"]
    assert {"run": "make dist"} in jobs["build"]["steps"]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write", "attestations": "write", "contents": "read"}
    assert not any("password" in step.get("with", {}) for step in jobs["publish"]["steps"])
