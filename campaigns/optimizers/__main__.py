"""Placeholder."""
import sys, tempfile, time
from pathlib import Path
from campaigns.optimizers.catalog import *
from campaigns.optimizers.round_trip import try_optimizers, LAYOUTS
from tests.helpers.pool import Ranks
def main():
    ranks = Ranks()
    package, layout, *names = sys.argv[1:]
    t=time.time()
    with tempfile.TemporaryDirectory() as f:
        v = try_optimizers(ranks, Path(f), package, names or list(list_recipes(package)), layout)
        for n, x in v.items(): print(package, layout, n, x.kind, x.text)
    print(time.time()-t)
    ranks.close()
if __name__ == "__main__": main()
