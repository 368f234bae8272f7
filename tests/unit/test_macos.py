"""Tests that everything can be imported on macOS, and that checkpoints can be read and converted there.

A process of its own plays macOS: it lacks the names that Python or the system's library have on Linux only. Each
program runs in a fork of it, which has imported nothing of rankless.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rankless

#: Runs before the first import of rankless. numpy and torch are loaded already: theirs are the builds for Linux.
MACOS = """
import gc
gc.disable()  # it would go through all of torch
import ctypes, fcntl, mmap, os, resource, select, signal, socket, sys, sysconfig, time
import numpy, torch, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.tensor
import torch._subclasses.fake_tensor, torch.distributed.optim

sysconfig.get_config_vars()  # those of this Python, by the name of its platform

LINUX_ONLY = {
    os: ("O_DIRECT O_TMPFILE O_PATH O_NOATIME O_LARGEFILE O_RSYNC posix_fallocate posix_fadvise memfd_create eventfd "
         "eventfd_read eventfd_write sched_getaffinity sched_setaffinity sched_getparam sched_setscheduler pidfd_open "
         "copy_file_range splice fdatasync pipe2 getxattr setxattr listxattr removexattr getrandom setns unshare "
         "getresuid getresgid setresuid setresgid timerfd_create"),
    signal: "sigtimedwait sigwaitinfo pidfd_send_signal SIGPOLL SIGPWR SIGRTMIN SIGRTMAX SIGSTKFLT SIGCLD",
    mmap: "MADV_HUGEPAGE MADV_NOHUGEPAGE MADV_DONTFORK MADV_DOFORK MADV_REMOVE MADV_MERGEABLE MAP_POPULATE MAP_STACK",
    fcntl: "F_OFD_SETLK F_OFD_SETLKW F_OFD_GETLK F_ADD_SEALS F_GET_SEALS F_GETPIPE_SZ F_SETPIPE_SZ F_NOTIFY F_SETLEASE",
    resource: "prlimit RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_SIGPENDING",
    select: "epoll",
    socket: "AF_NETLINK AF_PACKET AF_VSOCK",
    time: "CLOCK_BOOTTIME pthread_getcpuclockid",
}
for module, names in LINUX_ONLY.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
    for name in [name for name in vars(module) if name.startswith(("POSIX_FADV_", "MFD_", "EFD_", "SCHED_", "RWF_"))]:
        delattr(module, name)


class Libc(ctypes.CDLL):
    "The system's library without what Linux alone has, or has with other arguments."

    def __getattr__(self, name):
        if name in {"renameat2", "syscall", "statfs", "statx", "prctl", "fallocate"}:
            raise AttributeError(name)
        return super().__getattr__(name)


def refuse_proc(event, arguments):
    if event in {"open", "os.listdir", "os.scandir"} and str(arguments[0]).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])


ctypes.CDLL = Libc
sys.platform = "darwin"
sys.addaudithook(refuse_proc)
assert not any(name.startswith("rankless") for name in sys.modules)
"""

#: Runs programs in forks, one for each line: its text, its arguments, and the files for what it prints.
FORKS = """
import json
for line in sys.stdin:
    program, sys.argv[1:], *files = json.loads(line)
    child = os.fork()
    if not child:
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), number)
        exec(program)
        sys.stdout.flush()
        os._exit(0)  # without the time that it takes to undo the imports
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

#: Runs the commands in a JSON list of lists of arguments, and prints what they print.
COMMANDS = """
import json
from typer.testing import CliRunner
from rankless.cli.main import app
outputs = []
for arguments in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    outputs.append((result.exit_code, result.stdout))
print(json.dumps(outputs))
"""

#: Targets of a conversion, and the endings of their files. Those without an ending are folders.
TARGETS = {"native": "", "hf": "", "dcp": "", "lightning": ".ckpt", "safetensors": ".safetensors", "torch": ".pt"}


class MacOS:
    """The process that plays macOS."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._output, self._errors = folder / "output", folder / "errors"

    def run_program(self, program: str, *args: object) -> str:
        """Return what a program prints."""
        assert self._process.stdin
        assert self._process.stdout
        files = [self._output, self._errors]
        for file in files:
            file.unlink(missing_ok=True)
        print(
            json.dumps([program, [str(argument) for argument in args], *map(str, files)]),
            file=self._process.stdin,
            flush=True,
        )
        code = int(self._process.stdout.readline())
        assert code == 0, self._output.read_text() + self._errors.read_text()
        return self._output.read_text()

    def run_commands(self, *commands: list[object]) -> list[tuple[int, str]]:
        """Return the exit code and the output of each command."""
        printed = self.run_program(COMMANDS, json.dumps([[str(argument) for argument in each] for each in commands]))
        return [(code, output) for code, output in json.loads(printed)]


@pytest.fixture(scope="module")
def macos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MacOS]:
    command = [sys.executable, "-c", MACOS + FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield MacOS(process, tmp_path_factory.mktemp("printed"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("macos") / "run"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.Linear(900, 3))  # more than a direct read needs
    optimizer = torch.optim.AdamW(model.parameters())
    for step in (1, 2):
        model(torch.ones(1, 700)).sum().backward()
        optimizer.step()
        rankless.save_checkpoint(path, f"step_{step}", model, optimizer, step=step)
    return path


@pytest.fixture(scope="module")
def weights(run: Path) -> dict[str, torch.Tensor]:
    """What safetensors itself reads."""
    return load_file(run / "step_2/model/model.safetensors")


def test_every_module_can_be_imported(macos: MacOS) -> None:
    macos.run_program("""
import pkgutil, importlib, rankless
# These need other packages.
names = ("__main__", "deepspeed.engine", "lightning", "ray", "sglang", "torchtitan", "transformers", "vllm")
extras = tuple(f"rankless.{name}" for name in names)
for module in pkgutil.walk_packages(rankless.__path__, "rankless."):
    if not module.name.startswith(extras) or module.name.endswith((".reader", ".writer")):
        importlib.import_module(module.name)
""")


def test_a_checkpoint_opens(macos: MacOS, run: Path, weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    program = "import rankless; c = rankless.open(sys.argv[1]); torch.save({name: c[name] for name in c}, sys.argv[2])"
    macos.run_program(program, run, tmp_path / "opened.pt")
    check_model(torch.load(tmp_path / "opened.pt"), weights)


def test_commands_read_checkpoints(macos: MacOS, run: Path, weights: dict[str, torch.Tensor]) -> None:
    first, second = run / "step_1", run / "step_2"
    commands = [["ls", run], ["show", run], ["verify", run], ["diff", first, first], ["diff", first, second]]
    listed, shown, verified, same, other = macos.run_commands(*commands)
    assert [code for code, _ in (listed, shown, verified, same, other)] == [0, 0, 0, 0, 1]
    assert all(tag in listed[1] for tag in ("step_1", "step_2"))
    assert all(name in shown[1] for name in weights)
    assert "verified" in verified[1]
    assert "no difference" in same[1]
    assert all(name in other[1] for name in weights)


def test_conversions_keep_every_value(
    macos: MacOS, run: Path, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    targets = {to: tmp_path / f"{to}{ending}" for to, ending in TARGETS.items()}
    ended = macos.run_commands(*(["convert", run, target, "--to", to] for to, target in targets.items()))
    assert [code for code, _ in ended] == [0] * len(targets)
    for target in targets.values():
        check_model(rankless.open(target), weights)


def check_model(opened: Mapping[str, torch.Tensor] | rankless.Checkpoint, weights: dict[str, torch.Tensor]) -> None:
    prefix = "model/"
    assert {name.removeprefix(prefix) for name in opened if name.startswith(prefix)} == weights.keys()
    assert all(torch.equal(opened[prefix + name], tensor) for name, tensor in weights.items())
