"""Check the manifests in the guides: the schemas of Kubernetes, and what must agree. ``make docs`` runs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

_GUIDE = Path(__file__).parent / "guides/kubernetes.md"

#: A version of Kubernetes that is in use for long.
_VERSION = "1.31"


def main() -> None:
    """Raise an error that names the first field that is wrong or unknown, or all that do not agree."""
    blocks = re.findall(r"^```yaml\n(.*?)^```$", _GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    manifests = [manifest for block in blocks for manifest in yaml.safe_load_all(block)]
    for manifest in manifests:
        kubernetes_validate.validate(manifest, _VERSION, strict=True)
    kinds = sorted(manifest["kind"] for manifest in manifests)
    if kinds != ["Job", "Service"]:
        raise SystemExit(f"{_GUIDE} has the manifests {kinds}")
    service, job = sorted(manifests, key=lambda manifest: str(manifest["kind"]), reverse=True)
    if wrong := find_disagreements(service, job):
        raise SystemExit(f"{_GUIDE}: {'; '.join(wrong)}")


def find_disagreements(service: dict[str, Any], job: dict[str, Any]) -> list[str]:
    """Return what does not agree: names, numbers of pods and GPUs, times, and folders."""
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    name, command = job["metadata"]["name"], container["command"][-1]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    seconds = int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    rules = {
        "the Service selects no pod of the Job": service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name},
        "the pods have no names in the Service": pod["subdomain"] == service["metadata"]["name"],
        "torchrun waits for another host": f"--rdzv-endpoint {name}-0.{pod['subdomain']}:" in command,
        "torchrun has another number of hosts": f"--nnodes {job['spec']['completions']} " in command,
        "not all pods run at once": job["spec"]["completions"] == job["spec"]["parallelism"],
        "torchrun has another number of GPUs": f"--nproc-per-node {container['resources']['limits']['nvidia.com/gpu']} "
        in command,
        "the ranks are killed by the pod's end": seconds < pod["terminationGracePeriodSeconds"],
        "the shell gets SIGTERM": command.startswith("exec "),
        "the folder is on no volume": any(container["workingDir"].startswith(f"{path}/") for path in mounts),
        "a mount has no volume": sorted(mounts.values()) == sorted(volume["name"] for volume in pod["volumes"]),
    }
    return [wrong for wrong, is_right in rules.items() if not is_right]


if __name__ == "__main__":
    main()
