"""The real object stores of the campaign: each is installed into a folder, started, and stopped again.

All run as root, keep little, and accept small parts of uploads, so that small checkpoints have several. LocalStack does
not accept small parts: it refuses what AWS refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from campaigns.common.reserved_port import reserve_port
from campaigns.objects.ceph import run_ceph
from campaigns.objects.installing import (
    call,
    fill_template,
    install_npm_package,
    install_packages,
    make_empty,
)
from campaigns.objects.server import AzureServer, S3Server, Server, start_process, stopped_at_end, wait_for

#: The account of Azurite, and its key, which its documentation publishes.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextmanager
def run_swift(folder: Path) -> Iterator[S3Server]:
    """Run OpenStack Swift with its S3 API: four processes and one copy of the data on the disk."""
    bin_folder = install_packages(folder, "swift==2.38.3", "anycrc")
    data = make_empty(folder / "data")
    (data / "dev/d1").mkdir(parents=True)
    with ExitStack() as stack:
        ports = {name: stack.enter_context(reserve_port()) for name in ("account", "container", "object", "proxy")}
        _prepare_swift(bin_folder, data, ports)
        server = S3Server(f"http://127.0.0.1:{ports['proxy']}", "test:tester", "testing", is_racy=True)
        stack.enter_context(stopped_at_end(server))
        for name in ports:
            start_process(
                server, data / f"{name}.log", bin_folder / f"swift-{name}-server", data / f"{name}-server.conf"
            )
        yield wait_for(server)


def _prepare_swift(bin_folder: Path, data: Path, ports: Mapping[str, int]) -> None:
    """Write the configuration of all processes, and the rings, which tell the proxy where the others are."""
    for name in ("swift.conf", "proxy-server.conf"):
        fill_template(name, data / name, FOLDER=data, PORT=ports["proxy"])
    for name in ("account", "container", "object"):
        number = ports[name]
        fill_template("storage-server.conf", data / f"{name}-server.conf", FOLDER=data, PORT=number, NAME=name)
        ring = [bin_folder / "swift-ring-builder", data / f"{name}.builder"]
        call(*ring, "create", "2", "1", "1")
        call(
            *ring,
            "add",
            "--region",
            "1",
            "--zone",
            "1",
            "--ip",
            "127.0.0.1",
            "--port",
            str(number),
            "--device",
            "d1",
            "--weight",
            "1",
        )
        call(*ring, "rebalance")


@contextmanager
def run_localstack(folder: Path) -> Iterator[S3Server]:
    """Run LocalStack's S3, whose refusals are those that were recorded from AWS."""
    bin_folder = install_packages(
        folder, "localstack-core[base-runtime]==4.12.0", "cbor2<5.8", "pyopenssl<24.3", "setuptools<81"
    )
    settings = {
        "GATEWAY_SERVER": "hypercorn",
        "SERVICES": "s3",
        "STRICT_SERVICE_LOADING": "1",
        "EAGER_SERVICE_LOADING": "1",
        "DISABLE_EVENTS": "1",
        "SKIP_SSL_CERT_DOWNLOAD": "1",
        "SKIP_INFRA_DOWNLOADS": "1",
    }
    with reserve_port() as port:
        server = S3Server(f"http://127.0.0.1:{port}", "test", "test", takes_small_parts=False)
        with stopped_at_end(server):
            command = (bin_folder / "python", "-m", "localstack.runtime.main")
            settings["GATEWAY_LISTEN"] = f"127.0.0.1:{port}"
            start_process(server, folder / "log", *command, environment=settings)
            yield wait_for(server)


@contextmanager
def run_azurite(folder: Path) -> Iterator[AzureServer]:
    """Run Azurite, Microsoft's emulator of Azure Storage. It ignores CRCs, so it does not notice bytes that change."""
    bin_folder = install_npm_package(folder, "azurite@3.35.0")
    data = make_empty(folder / "data")
    with reserve_port() as port:
        server = AzureServer(f"http://127.0.0.1:{port}", _ACCOUNT, _KEY, notices_changes=False)
        address = ("--blobHost", "127.0.0.1", "--blobPort", str(port))
        with stopped_at_end(server):
            command = (bin_folder / "azurite-blob", *address, "--location", data, "--silent", "--loose")
            start_process(server, folder / "log", *command, "--skipApiVersionCheck", "--disableTelemetry")
            yield wait_for(server)


#: The servers by name.
SERVERS: Mapping[str, Callable[[Path], AbstractContextManager[Server]]] = {
    "swift": run_swift,
    "ceph": run_ceph,
    "ceph20": partial(run_ceph, suite="sid"),
    "localstack": run_localstack,
    "azurite": run_azurite,
}
