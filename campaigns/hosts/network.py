"""Two networks between the hosts: one for data, which a test may cut, and one for the test's own control."""

from __future__ import annotations

from campaigns.common.programs import run

#: The first three numbers of the addresses. The last one is the host's number; this machine has 1.
DATA, CONTROL = "10.77.0", "10.78.0"

#: A queue that is too short for any packet.
_DROP_ALL = ("root", "tbf", "rate", "8bit", "burst", "10", "limit", "10")

_NETWORKS = {"data": DATA, "control": CONTROL}


def create_networks() -> None:
    """Create a bridge for each network, in this process's network namespace."""
    run("ip", "link", "set", "lo", "up")
    for name, prefix in _NETWORKS.items():
        run("ip", "link", "add", name, "type", "bridge")
        run("ip", "address", "add", f"{prefix}.1/24", "dev", name)
        run("ip", "link", "set", name, "up")


def create_links(number: int) -> None:
    """Create a host's network devices, one on each bridge."""
    for name in _NETWORKS:
        run("ip", "tuntap", "add", link_name(name, number), "mode", "tap")
        run("ip", "link", "set", link_name(name, number), "master", name, "up")


def link_name(network: str, number: int) -> str:
    """Return the name of a host's device on a network."""
    return f"{network}{number}"


def cut_link(number: int) -> None:
    """Cut a host off the data network."""
    # A device that is set down is broken for its kernel, also when it is up again.
    run("ip", "link", "set", link_name("data", number), "nomaster")


def restore_link(number: int) -> None:
    """Connect a host to the data network again."""
    run("ip", "link", "set", link_name("data", number), "master", "data")


def lose_replies(number: int) -> None:
    """Drop all that others send to a host on the data network. What it sends arrives."""
    run("tc", "qdisc", "add", "dev", link_name("data", number), *_DROP_ALL)


def deliver_replies(number: int) -> None:
    """End :func:`lose_replies`."""
    run("tc", "qdisc", "del", "dev", link_name("data", number), "root")
