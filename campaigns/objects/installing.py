"""Packages of Python, Debian and npm, which are installed into folders of their own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

_TEMPLATES = Path(__file__).parent / "templates"

#: The source of another suite of Debian than that of this host, from the same mirror.
_SOURCE = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] {} {} main\n"


def unpack_debian_packages(folder: Path, root: Path, *names: str, suite: str = "") -> None:
    """Unpack packages and all that they depend on, without a change of this host's packages.

    They are those of this host's suite of Debian if ``suite`` is empty.
    """
    tree = folder / "apt"
    for name in ("etc/apt", "var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "var/lib/dpkg"):
        (tree / name).mkdir(parents=True, exist_ok=True)
    if suite:
        (tree / "etc/apt/sources.list").write_text(_SOURCE.format(_find_mirror(), suite))
    else:
        shutil.copytree("/etc/apt", tree / "etc/apt", dirs_exist_ok=True)
    (tree / "var/lib/dpkg/status").touch()
    options = [
        f"Dir={tree}",
        f"Dir::State::status={tree}/var/lib/dpkg/status",
        "APT::Install-Recommends=false",
        "APT::Sandbox::User=root",
    ]
    apt = ["apt-get", *(text for option in options for text in ("-o", option))]
    call(*apt, "update")
    call(*apt, "-y", "--download-only", "install", *names)
    for package in sorted((tree / "var/cache/apt/archives").glob("*.deb")):
        call("dpkg-deb", "-x", package, root)


def _find_mirror() -> str:
    """Return the URL that this host gets its packages of Debian from."""
    for file in (*Path("/etc/apt").glob("sources.list"), *Path("/etc/apt/sources.list.d").glob("*.sources")):
        if mirror := re.search(r"https?://\S+/debian(?=\s)", file.read_text()):
            return mirror[0]
    raise RuntimeError("no source of Debian's packages in /etc/apt: Ceph is installed from there")


def install_npm_package(folder: Path, requirement: str) -> Path:
    """Install a package of npm, unless it is there. Return the folder of its programs."""
    if not (folder / "installed").exists():
        call("npm", "install", "--no-audit", "--no-fund", "--prefix", folder, requirement)
        (folder / "installed").touch()
    return folder / "node_modules/.bin"


def install_packages(folder: Path, *requirements: str) -> Path:
    """Install Python packages into an environment, unless it is there. Return its folder of programs."""
    environment = folder / "venv"
    if not (folder / "installed").exists():
        call(sys.executable, "-m", "venv", environment)
        call(environment / "bin/python", "-m", "pip", "install", "--quiet", *requirements)
        (folder / "installed").touch()
    return environment / "bin"


def fill_template(name: str, path: Path, **values: object) -> None:
    """Write a configuration file: a template in which each ``@NAME@`` is replaced."""
    text = (_TEMPLATES / name).read_text()
    for key, value in values.items():
        text = text.replace(f"@{key}@", str(value))
    path.write_text(text)


def make_empty(folder: Path) -> Path:
    """Make a folder, or remove all that is in it. Return it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def call(*command: str | Path) -> str:
    """Run a program, and return what it prints. Raises ``RuntimeError`` if it fails."""
    done = subprocess.run([*map(str, command)], check=False, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed: {done.stderr[-2000:] or done.stdout[-2000:]}")
    return done.stdout
