"""Ceph's Object Gateway of a release of Debian, in a root directory of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from campaigns.common.reserved_port import reserve_port
from campaigns.objects.installing import call, fill_template, make_empty, unpack_debian_packages
from campaigns.objects.server import S3Server, start_process, stopped_at_end, wait_for

#: The id of the Ceph cluster.
_CLUSTER = "8b1c9a4e-5d1f-4c39-9a52-6f4f0c7f9d11"


@contextmanager
def run_ceph(folder: Path, suite: str = "") -> Iterator[S3Server]:
    """Run the Ceph Object Gateway of this Debian, or of another suite of Debian.

    It consists of a monitor, a storage daemon in memory, and the gateway. Their packages are unpacked into a folder of
    their own, which the processes see as their root.
    """
    root = folder / "root"
    if not (folder / "installed").exists():
        unpack_debian_packages(folder, root, "radosgw", "ceph-mon", "ceph-osd", "coreutils", suite=suite)
        (folder / "installed").touch()
    with reserve_port() as port:
        _prepare_ceph_root(root, port)
        server = S3Server(f"http://127.0.0.1:{port}", "key", "secret")
        with _mounted_proc(root), stopped_at_end(server):
            _start_ceph(server, root)
            yield wait_for(server)


def _prepare_ceph_root(root: Path, port: int) -> None:
    for name in ("lib", "lib64", "bin", "sbin"):
        if not (root / name).exists():
            (root / name).symlink_to(f"usr/{name}")
    for name in ("mon/ceph-a", "osd/ceph-0", "radosgw"):
        make_empty(root / "var/lib/ceph" / name)
    for name in ("proc", "dev", "tmp", "etc/ceph", "var/log/ceph", "run/ceph"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name, minor in {"null": 3, "zero": 5, "random": 8, "urandom": 9}.items():
        if not (root / "dev" / name).exists():
            os.mknod(root / "dev" / name, 0o20666, os.makedev(1, minor))
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "etc/os-release").write_text("NAME=Debian\nID=debian\nVERSION_ID=0\nPRETTY_NAME=Debian\n")
    (root / "etc/ceph/keyring").unlink(missing_ok=True)
    fill_template("ceph.conf", root / "etc/ceph/ceph.conf", PORT=port, CLUSTER=_CLUSTER)


def _start_ceph(server: S3Server, root: Path) -> None:
    keyring = "/etc/ceph/keyring"
    _chroot(root, "ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    everything = [text for name in ("mon", "osd", "mgr") for text in ("--cap", name, "allow *")]
    _chroot(root, "ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *everything)
    _chroot(
        root,
        "monmaptool",
        "--create",
        "--fsid",
        _CLUSTER,
        "--addv",
        "a",
        "[v2:127.0.0.1:3300,v1:127.0.0.1:6789]",
        "/run/monmap",
        "--clobber",
    )
    _chroot(root, "ceph-mon", "--mkfs", "-i", "a", "--monmap", "/run/monmap", "--keyring", keyring)
    start_process(server, root / "mon.log", *_in_root(root, "ceph-mon", "-f", "-i", "a"))
    identity = Path("/proc/sys/kernel/random/uuid").read_text().strip()
    _chroot(root, "ceph", "--connect-timeout", "60", "osd", "new", identity)
    key = _chroot(root, "ceph", "auth", "get-or-create", "osd.0", "mon", "allow profile osd", "osd", "allow *")
    with (root / "etc/ceph/keyring").open("a") as file:
        file.write(key)
    _chroot(root, "ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", identity)
    start_process(server, root / "osd.log", *_in_root(root, "ceph-osd", "-f", "-i", "0"))
    user = ("--uid=t", "--display-name=t", f"--access-key={server.access_key}", f"--secret-key={server.secret_key}")
    _chroot(root, "radosgw-admin", "user", "create", *user)
    start_process(server, root / "rgw.log", *_in_root(root, "radosgw", "-f", "--name", "client.admin"))


def _in_root(root: Path, program: str, *arguments: str) -> tuple[str, ...]:
    return "chroot", str(root), f"/usr/bin/{program}", *arguments


def _chroot(root: Path, program: str, *arguments: str) -> str:
    return call(*_in_root(root, program, *arguments))


@contextmanager
def _mounted_proc(root: Path) -> Iterator[None]:
    call("mount", "-t", "proc", "proc", root / "proc")
    try:
        yield
    finally:
        call("umount", "--lazy", root / "proc")
