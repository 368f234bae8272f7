"""``python -m campaigns.hosts setup`` downloads the packages; ``… check`` says whether the test bed can run here."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from campaigns.hosts.packages import DEFAULT_FOLDER, download_packages, missing_parts
from campaigns.hosts.testbed import enter_namespaces, running_testbed

print(sys.argv)
enter_namespaces(sys.argv[1:])
from campaigns.hosts import guest
import time
t=time.time()
with running_testbed(DEFAULT_FOLDER, 2) as bed:
    print("up", time.time()-t)
    for v in ("4.2","3"):
        for c in bed.clients:
            with c.worker() as w:
                print(v, w.call(guest.mount_nfs, bed.server.address, v, (), Path("/shared"+v)))
                print(w.call(guest.execute, "ls -la /shared%s; df -h /shared%s; touch /shared%s/%s"%(v,v,v,c.spec.name)))
    print("done", time.time()-t)
