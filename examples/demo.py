"""A demo: a training job is killed twice, and resumed on other numbers of ranks.

`make demo` runs it. It writes all files to `demo_run` in the current directory.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

import rankless

TRAIN = Path(__file__).with_name("train.py")
FOLDER = Path("demo_run")
LOG = FOLDER / "torchrun.log"
STEPS, SAVE_EVERY = 120, 10
#: The largest difference between the losses of the two runs, due to rounding in sums of another order.
TOLERANCE = 1e-4
#: The time limit of one job in seconds.
PATIENCE = 300.0
#: Environment variables that make training quiet and let it share two cores.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}

console = Console(highlight=False, width=min(80, Console().width))


class DemoError(Exception):
    """The demo did not go as expected."""


@dataclass(frozen=True)
class Step:
    """The line that the training script prints for a step."""

    step: int
    loss: float
    ranks: int


class Job:
    """The training script under `torchrun`, and the output of its rank 0."""

    def __init__(self, run: Path, ranks: int) -> None:
        options = ["--standalone", f"--nproc-per-node={ranks}", f"--log-dir={FOLDER / 'logs'}"]
        script = [str(TRAIN), str(run), f"--steps={STEPS}", f"--save-every={SAVE_EVERY}"]
        self.steps: list[Step] = []
        with LOG.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options, *script],
                env=os.environ | ENVIRONMENT,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            if line.startswith("{"):
                self.steps.append(Step(**json.loads(line)))

    @property
    def last_step(self) -> int:
        """The last step that it has reported."""
        return self.steps[-1].step if self.steps else 0

    def is_running(self) -> bool:
        """Whether any of its processes is alive. All of them hold the pipe, which ends with the last one."""
        return self._reader.is_alive()

    def kill(self) -> None:
        """Send SIGKILL, which no process can handle, to torchrun and every rank."""
        for pid in list_descendants(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._reader.join(30)
        if self.is_running():
            raise DemoError("a rank has survived SIGKILL")
        self._process.wait()

    def check_first_step(self, after: int) -> None:
        """Raise unless its first step directly follows the given one."""
        if not self.steps or self.steps[0].step != after + 1:
            raise DemoError(f"the job did not go on after step {after}. {read_errors()}")

    def wait_for_success(self) -> None:
        """Raise unless it ended by itself and successfully."""
        status = self._process.wait()
        if status != 0:
            raise DemoError(f"the job ended with status {status}. {read_errors()}")


def read_errors() -> str:
    """Return the start of the last job's stderr, where the first error is."""
    return "\n".join([f"{LOG} begins:", *LOG.read_text().splitlines()[:40]])


def list_descendants(pid: int) -> list[int]:
    """Return a process, its children, and their descendants.

    `torchrun` starts every rank in a session of its own, so no process group contains all of them.
    """
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    pids = [pid]
    for parent in pids:
        pids += [child for child, its_parent in parents.items() if its_parent == parent]
    return pids


@contextmanager
def start_job(run: Path, ranks: int) -> Iterator[Job]:
    """Start a job. None of its processes is left running at the end, even after an error."""
    print_text(f"[bold]$ torchrun --nproc-per-node {ranks} examples/train.py {run} --steps {STEPS}[/]")
    job = Job(run, ranks)
    try:
        yield job
    finally:
        if job.is_running():
            job.kill()


def follow_job(job: Job, until: Callable[[], bool] = lambda: False) -> None:
    """Print a job's progress until it ends or ``until`` holds."""
    deadline = time.monotonic() + PATIENCE
    printed, going_on = 0, True
    while going_on:
        time.sleep(0.002)
        going_on = job.is_running() and not until()
        for step in job.steps[printed:]:
            printed += 1
            if printed == 1 or step.step % 20 == 0:
                print_text(f"  step {step.step:3}   loss {step.loss:.4f}")
        if time.monotonic() > deadline:
            raise DemoError(f"the job was not done after {PATIENCE:.0f} seconds")


def train_uninterrupted(run: Path) -> list[Step]:
    """Train on four ranks from beginning to end."""
    with start_job(run, 4) as job:
        follow_job(job)
        job.wait_for_success()
    return job.steps


def train_interrupted(run: Path) -> list[list[Step]]:
    """Train in three jobs: killed at a random moment, killed in the middle of a save, and run to the end."""
    moment = random.randint(4 * SAVE_EVERY, 6 * SAVE_EVERY)
    with start_job(run, 4) as first:
        follow_job(first, until=lambda: first.last_step >= moment)
        time.sleep(random.uniform(0, 0.2))
        saved = kill_job(first, run, known=set())

    known = list_staging_directories(run)
    with start_job(run, 2) as second:
        follow_job(
            second,
            until=lambda: second.last_step >= moment + 2 * SAVE_EVERY and bool(list_staging_directories(run) - known),
        )
        second.check_first_step(after=saved)
        saved = kill_job(second, run, known)

    with start_job(run, 3) as third:
        follow_job(third)
        third.wait_for_success()
        third.check_first_step(after=saved)
    return [first.steps, second.steps, third.steps]


def kill_job(job: Job, run: Path, known: set[str]) -> int:
    """Kill a job, print what is left in the run's directory, and return the step of the newest checkpoint.

    ``known`` are the partial saves that were there before the job.
    """
    job.kill()
    if not 0 < job.last_step < STEPS:
        raise DemoError(f"the job was to be killed in the middle, and was at step {job.last_step}")
    newest = int(rankless.list_checkpoints(run)[-1].step or 0)
    print_text(f"[red]kill -9[/] for torchrun and its {job.steps[0].ranks} ranks, after step {job.last_step}.")
    for name in sorted(list_staging_directories(run) - known):
        print_text(f"It was in the middle of a save, which left {name}: hidden, never listed, never loaded.")
    lost = job.last_step - newest
    cost = f"{lost} step{'s' * (lost > 1)} will be done again." if lost else "nothing is lost."
    print_text(f"The newest complete checkpoint is [bold]step_{newest}[/]; {cost}\n")
    return newest


def list_staging_directories(run: Path) -> set[str]:
    """Return the staging directories of saves in progress or of killed jobs."""
    return {folder.name for folder in run.glob(".*.partial")}


def compare_losses(reference: list[Step], jobs: list[list[Step]]) -> None:
    """Print the losses of both runs. Raises if they differ or steps are missing."""
    expected = {step.step: step.loss for step in reference}
    done = {step.step for steps in jobs for step in steps}
    if not done == expected.keys() == set(range(1, STEPS + 1)):
        raise DemoError("the losses of some steps are missing")
    print_text("Some of the steps. Each gap is a kill; the lost steps are done twice.")
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("step", "undisturbed, 4 ranks", "killed twice", "ranks", "difference"):
        table.add_column(heading, justify="right")
    for steps in jobs:
        for step in steps:
            if step.step % 20 == 0 or step in (steps[0], steps[-1]):
                other = expected[step.step]
                gap = f"{abs(step.loss - other):.1e}" if step.loss != other else "0"
                table.add_row(f"{step.step}", f"{other:.6f}", f"{step.loss:.6f}", f"{step.ranks}", gap)
        table.add_section()
    console.print(table)

    apart = max(abs(step.loss - expected[step.step]) for steps in jobs for step in steps)
    print_text(f"Over all {STEPS} steps the losses differ by at most [bold]{apart:.1e}[/].")
    if apart > TOLERANCE:
        raise DemoError(f"that is more than rounding ({TOLERANCE:.0e}): the run did not resume where it was")
    print_text("This is rounding: other numbers of ranks sum gradients in another order.")


def generate_text(folder: Path) -> Text:
    """Complete the start of a function with the model of a checkpoint. Nothing here uses rankless."""
    # transformers imports torchao if it is installed, which warns that parts of it are for GPUs or other versions.
    for logger in ("torchao", "torch.utils._pytree"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    beginning = torch.tensor([list(b"def ")])
    torch.manual_seed(0)
    tokens = model.generate(
        beginning, attention_mask=torch.ones_like(beginning), max_new_tokens=180, do_sample=True, temperature=0.6
    )
    print_text(f"Text that its {model.num_parameters():,} parameters generate after {STEPS} steps:")
    return Text(bytes(tokens[0].tolist()).decode(errors="replace").rstrip())


def write_report(run: Path, page: Path) -> None:
    """Write the report of a run."""
    options = [str(run), "--stats", "--output", str(page)]
    print_text(f"[bold]$ rankless report {' '.join(options)}[/]")
    done = subprocess.run([sys.executable, "-m", "rankless", "report", *options], check=False, capture_output=True)
    if done.returncode:
        raise DemoError(f"the report was not written: {done.stderr.decode()}")
    print_text(f"Open {page} in a browser: its saves, the kills and resumes, where the bytes are, and all tensors.")


def build_tree(folder: Path) -> Tree:
    """Return the files of a checkpoint with their sizes."""
    root = Tree(f"[bold]{folder}/[/]", guide_style="dim")
    _add_entries(root, folder)
    return root


def _add_entries(branch: Tree, folder: Path) -> None:
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_file(), path.name)):
        if path.is_dir():
            _add_entries(branch.add(f"[bold]{path.name}/[/]"), path)
        else:
            branch.add(f"{path.name}  [dim]{decimal(path.stat().st_size)}[/]")


def print_text(text: str) -> None:
    """Print a sentence or two."""
    console.print(text)


def print_heading(title: str) -> None:
    """Print the heading of a chapter."""
    console.print()
    console.rule(f"[bold]{title}[/]", align="left")


def run_demo() -> None:
    """Run the whole demo."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    print_text(
        "A small Llama learns to write Python from the sources of the standard library, on 4 ranks under FSDP2. "
        "Then the same training is killed twice, and each time resumes on another number of ranks. "
        "The losses must be the same."
    )

    print_heading("1. An undisturbed training")
    reference = train_uninterrupted(FOLDER / "undisturbed")

    print_heading("2. The same training: killed on 4 ranks, killed on 2, finished on 3")
    run = FOLDER / "killed"
    jobs = train_interrupted(run)

    print_heading("3. The losses of both runs")
    compare_losses(reference, jobs)

    last = run / f"step_{STEPS}"
    print_heading("4. The model, loaded by transformers directly from the checkpoint")
    print_text(f'[bold]>>> AutoModelForCausalLM.from_pretrained("{last / "model"}")[/]')
    console.print(Padding(generate_text(last / "model"), (1, 4, 0, 4)))

    print_heading("5. The files of that checkpoint")
    console.print(build_tree(last))

    print_heading("6. What the run looks like")
    write_report(run, FOLDER / "report.html")


def main() -> int:
    """Run the demo. Return 1 if it fails."""
    begun = time.monotonic()
    try:
        run_demo()
    except DemoError as error:
        console.print(Text(f"The demo failed: {error}", style="red"), soft_wrap=True)
        return 1
    print_text(f"\nAll of this took {time.monotonic() - begun:.0f} seconds.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
