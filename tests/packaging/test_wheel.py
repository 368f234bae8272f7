"""Tests the wheel: built from a tagged copy of this repository, and run from the unpacked files."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message, message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIST = "rankless-1.2.3.dist-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = tmp_path_factory.mktemp("source") / "rankless", tmp_path_factory.mktemp("out")
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source / name)
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-C", str(source), "-c", "user.name=test", "-c", "user.email=test@example.org"]
    for arguments in (["init", "-q"], ["add", "--all"], ["commit", "-q", "-m", "all"], ["tag", "v1.2.3"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True)
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    return folder


def metadata(unpacked: Path) -> message.Message:
    return message_from_bytes((unpacked / DIST / "METADATA").read_bytes())


def test_its_version_is_of_the_tag(wheel: Path, unpacked: Path) -> None:
    assert wheel.name == "rankless-1.2.3-py3-none-any.whl"
    assert metadata(unpacked)["Version"] == "1.2.3"


def test_it_has_every_module_and_the_mark_of_types_and_nothing_else(unpacked: Path) -> None:
    actual = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    package = {path for path in actual if not path.startswith(DIST)}
    source = ROOT / "src"
    assert package == {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"rankless/py.typed", "rankless/__init__.pyi"} <= package
    assert {"METADATA", "WHEEL", "RECORD", "entry_points.txt"} <= {path.rpartition("/")[2] for path in actual - package}
    assert {path.name for path in (unpacked / DIST / "licenses").iterdir()} == {"LICENSE", "NOTICE"}


def test_it_asks_for_what_the_project_says(unpacked: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    actual = metadata(unpacked)
    assert actual["Requires-Python"] == project["requires-python"]
    assert actual.get_all("Provides-Extra") == sorted(project["optional-dependencies"])
    asked = actual.get_all("Requires-Dist")
    assert {item for item in asked or [] if "extra ==" not in item} == set(project["dependencies"])
    for extra, wanted in project["optional-dependencies"].items():
        assert {item for item in asked or [] if f"extra == '{extra}'" in item} == {
            f"{item}; extra == '{extra}'" for item in wanted
        }


def test_its_command_runs(unpacked: Path, tmp_path: Path) -> None:
    """From the wheel alone: the repository is not on the path."""
    assert "rankless = rankless.cli.entry:main" in (unpacked / DIST / "entry_points.txt").read_text()
    script = "from rankless.cli.entry import main; main()"
    for option, expected in (("--version", "rankless 1.2.3\n"), ("--help", "Usage: rankless [OPTIONS]")):
        done = subprocess.run(
            [sys.executable, "-c", script, option],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(unpacked)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.startswith(expected)


def export(tmp_path: Path, described: str) -> Path:
    """Return the files that ``git archive`` of a commit with this description has, as far as a build needs them."""
    folder = tmp_path / "archive"
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "src/rankless").mkdir(parents=True)
    form = (ROOT / ".git_archival.txt").read_text()
    assert form.startswith("describe-name: $Format:")
    assert len(form.splitlines()) == 1
    (folder / ".git_archival.txt").write_text(f"describe-name: {described}\n")
    return folder


@pytest.mark.parametrize(
    ("described", "version"), [("v1.2.3", "1.2.3"), ("v1.2.3-4-gabcdef0", "1.2.4.dev4"), ("", "0.1.0")]
)
def test_an_archive_of_a_commit_has_the_version_of_the_last_tag(tmp_path: Path, described: str, version: str) -> None:
    """Before the first tag it has the one of pyproject.toml: 0.0 would be older than everything that was published."""
    command = [sys.executable, "-m", "hatchling", "version"]
    done = subprocess.run(command, cwd=export(tmp_path, described), capture_output=True, text=True, check=True)
    assert done.stdout.strip().partition("+")[0] == version


def test_an_sdist_has_the_version_of_the_tag(wheel: Path, tmp_path: Path) -> None:
    """``wheel`` is built from a checkout, and so is this. What is built from the sdist has no history."""
    folder = export(tmp_path, "v1.2.3")
    build = [sys.executable, "-m", "hatchling", "build", "--target"]
    subprocess.run([*build, "sdist", "--directory", tmp_path], cwd=folder, check=True, capture_output=True)
    shutil.unpack_archive(tmp_path / "rankless-1.2.3.tar.gz", tmp_path, filter="data")
    unpacked = tmp_path / "rankless-1.2.3"
    (unpacked / ".git_archival.txt").unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "version"], cwd=unpacked, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == wheel.name.split("-")[1]
