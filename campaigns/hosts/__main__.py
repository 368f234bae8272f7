import argparse
import sys
from pathlib import Path

from campaigns.hosts.packages import DEFAULT_FOLDER, download_packages, missing_parts
from campaigns.hosts.testbed import running_testbed, KINDS
from campaigns.hosts.namespaces import run_in_namespaces
from campaigns.hosts.scenes import pages
import time
t=time.time()
def rep(x): print(round(time.time()-t), x, flush=True)
def main():
  with running_testbed(DEFAULT_FOLDER, 3, ['campaigns.hosts.scenes.pages']) as bed:
    rep("up")
    for k in sys.argv[1:] or KINDS:
        try: 
            bed.mount(k)
            rep(k)
            pages.run(bed, [k], 5, rep)
        except Exception as e: rep(k+str(e))
  return 0
sys.exit(run_in_namespaces(main))
