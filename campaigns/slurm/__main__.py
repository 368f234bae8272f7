"""Try this: start the cluster, and run a command in it."""
import os, subprocess, sys, tempfile, time, ctypes
from pathlib import Path
from campaigns.common.namespaces import run_in_namespaces
from campaigns.common.programs import run
from campaigns.slurm.packages import DEFAULT_FOLDER, download_packages, lay_over, missing_parts
from campaigns.slurm.cluster import Cluster

def play():
    ctypes.CDLL(None).unshare(0x04000000)
    scratch = Path(tempfile.mkdtemp(prefix="slurm-"))
    over = scratch / "over"; over.mkdir()
    run("mount", "-t", "tmpfs", "tmpfs", str(over))
    lay_over(DEFAULT_FOLDER, over)
    cluster = Cluster(scratch); print(scratch, flush=True)
    cluster.start()
    from campaigns.slurm.guide import write_files
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    write_files(scratch/"job")
    return subprocess.run(sys.argv[2:], cwd=scratch/"job").returncode if len(sys.argv) > 2 else 0

if sys.argv[1] == "setup":
    download_packages(DEFAULT_FOLDER)
else:
    print(missing_parts(DEFAULT_FOLDER)); sys.exit(run_in_namespaces(play))
