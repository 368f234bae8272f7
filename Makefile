# Each target sets up what it needs: a virtual environment in .venv with pinned versions.
PYTHON ?= python3
BIN := .venv/bin

# Tests start very many processes: without files of bytecode, each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-picture demo-hosts test core test-all slow left-out test-near near durations interop dist frameworks peers engines sglang optimizers accelerator accelerator-pack report-browser report-picture report-speed matrix coverage test-colossalai lint docs bench bench-full bench-compare bench-objects bench-published bench-engines gcs objects run-histories published-histories histories crash jobs kill faults fuzz mutate large hosts slurm tier tier-kill clean

## demo: train on four ranks, kill the job, resume it on two and on three
demo: .venv/installed
	$(BIN)/python examples/demo.py

## demo-picture: record the demo as docs/demo.svg, the moving picture of the README
demo-picture: .venv/installed
	$(BIN)/python examples/record_demo.py

## demo-hosts: train on four hosts while a rank is killed, a host is destroyed, and a host joins; needs root
demo-hosts: .venv/installed
	$(BIN)/python -m campaigns.tier demo

#: Four at a time, each with ranks of its own. Tests with ranks wait more than they compute, so two cores suffice.
#: Workers take files in the order of tests/helpers/suite.py, the longest first.
PYTEST := -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations 25
CORE := tests --ignore tests/interop --ignore tests/frameworks --ignore tests/peers --ignore tests/engines --ignore tests/browser

## test: lint, types, and the tests of rankless itself but the slow ones; lint runs beside the tests
test: .venv/installed
	$(MAKE) --no-print-directory --jobs 2 --keep-going lint core

core: .venv/installed
	$(BIN)/python $(PYTEST) --quick $(CORE)

## test-all: all that make test leaves out: slow cases, further cases and examples, and the tests with other systems
test-all:
	$(MAKE) --no-print-directory slow
	$(MAKE) --no-print-directory left-out
	$(MAKE) --no-print-directory interop

## slow: the slow cases of the tests of rankless itself, of tests/slow_cases.txt
slow: .venv/installed
	$(BIN)/python $(PYTEST) --slow $(CORE)

## left-out: the further cases and examples of the tests of rankless itself
left-out: .venv/installed
	$(BIN)/python $(PYTEST) --left-out $(CORE)

## test-near: lint, and the tests that can reach what has changed since the commit NEAR
test-near: .venv/installed
	$(MAKE) --no-print-directory --jobs 2 --keep-going lint near

#: The commit to compare the working tree with.
NEAR ?= HEAD

near: .venv/installed
	$(BIN)/python -m campaigns.near --base $(NEAR) | xargs --no-run-if-empty $(BIN)/python $(PYTEST)

## durations: measure how long each file of tests takes, for the order in which they run, and which cases are slow
durations: .venv/installed
	$(BIN)/python $(PYTEST) --write-durations $(CORE)
	$(BIN)/python $(PYTEST) --write-durations --left-out $(CORE)
	$(BIN)/python $(PYTEST) --write-durations --full tests/interop

#: With all cases; INTEROP= leaves out the further ones.
INTEROP ?= --full

## interop: the tests with other systems and their files
interop: .venv/installed
	$(BIN)/python $(PYTEST) $(INTEROP) tests/interop

## dist: build the sdist and the wheel, check them, and try each in an empty environment; DIST=--torch tries saves, too
dist: .dist/installed
	.dist/bin/python -m campaigns.dist $(DIST)

#: In an environment of its own: what is published is built without the packages of the tests.
.dist/installed: requirements-dist.txt
	$(PYTHON) -m venv .dist
	.dist/bin/python -m pip install --quiet --requirement requirements-dist.txt
	touch $@

## frameworks: the tests with torchtitan, Ray Train, torchft, TRL and diffusers, which are installed into .frameworks (2 GB) once
frameworks: .frameworks/installed
	PYTHONPATH=.frameworks $(BIN)/python $(PYTEST) tests/frameworks

.frameworks/installed: requirements-frameworks.txt .venv/installed
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .frameworks --requirement requirements-frameworks.txt
	touch $@

## peers: the tests in which DeepSpeed and megatron-core, which are installed into .peers (0.1 GB) once, load what rankless writes
peers: .peers/installed
	PYTHONPATH=.peers $(BIN)/python $(PYTEST) tests/peers

.peers/installed: requirements-peers.txt .venv/installed
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-deps --upgrade --target .peers --requirement requirements-peers.txt
	touch $@

## engines: a real vLLM, installed into .engines (1.2 GB) once: what it loads with rankless is what it loads itself
engines: .engines/installed
	PYTHONPATH=.engines $(BIN)/python -m pytest -q -n 2 tests/engines
	PYTHONPATH=.engines OMP_NUM_THREADS=1 $(BIN)/python -m campaigns.engines

## sglang: a real SGLang, installed into .sglang (1 GB) once beside .engines: what it loads with rankless is what it loads itself
sglang: .sglang/installed
	PYTHONPATH=.sglang:.engines $(BIN)/python -m pytest -q tests/engines/test_sglang.py

.sglang/installed: requirements-sglang.txt .engines/installed
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .sglang --requirement requirements-sglang.txt
	touch $@

## bench-engines: what vLLM's loaders read, and their processor time, from a disk and from an object store
bench-engines: .engines/installed .bench-objects/installed
	PYTHONPATH=.engines:.bench-objects $(BIN)/python -m benchmarks.engine_weights --ranks 1
	PYTHONPATH=.engines:.bench-objects $(BIN)/python -m benchmarks.engine_weights
	PYTHONPATH=.engines:.bench-objects $(BIN)/python -m benchmarks.engine_weights --store

.engines/installed: requirements-engines.txt .venv/installed
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .engines --requirement requirements-engines.txt
	touch $@

## optimizers: try the optimizers of many packages, which are installed into .optimizers (0.3 GB) once, by name; write the table of the docs
optimizers: .optimizers/installed
	PYTHONPATH=.optimizers $(BIN)/python -m campaigns.optimizers packages --write

.optimizers/installed: requirements-optimizers.txt .venv/installed
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .optimizers --requirement requirements-optimizers.txt
	touch $@

## accelerator: the tests on the accelerator of this machine, and figures, in 8 minutes; PYTHON has torch and needs no network
accelerator:
	$(PYTHON) -m campaigns.accelerator

## accelerator-pack: wheels of what `make accelerator` needs where there is no network, for the Python of version TARGET
accelerator-pack: .venv/installed
	$(BIN)/python -m campaigns.accelerator.pack $(if $(TARGET),--python $(TARGET))

## report-browser: the pages of `rankless report` in Chromium, which the system must have; Playwright is installed into .browser (0.1 GB)
report-browser: .browser/installed
	PYTHONPATH=.browser:src $(BIN)/python -m pytest tests/browser

.browser/installed: requirements-browser.txt .venv/installed
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .browser --requirement requirements-browser.txt
	touch $@

## report-picture: draw docs/report.png, the page of the run that make demo leaves
report-picture: .browser/installed
	PYTHONPATH=.browser $(BIN)/python -m campaigns.report_picture demo_run/report.html docs/report.png

## report-speed: how fast pages of 20,000 tensors open and scroll in Chromium
report-speed: .browser/installed
	PYTHONPATH=.browser $(BIN)/python -m campaigns.report_speed

## matrix: the tests of rankless itself with torch 2.7 to 2.15 on each Python that is on the PATH; 8 GB a version
matrix:
	$(PYTHON) -m campaigns.versions

## coverage: all of these tests again, slower, and the lines that they went through
coverage: .venv/installed
	$(BIN)/coverage erase
	$(BIN)/coverage run $(PYTEST)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --fail-under=95

## test-colossalai: against ColossalAI 0.5.0 itself, which is installed into .venv-colossalai (1.2 GB) once
test-colossalai: .venv/installed
	$(BIN)/python -m pytest tests/interop/colossalai -m colossalai

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	git ls-files -z | xargs -0 $(BIN)/codespell

## docs: docs/api.md and the options in docs/cli.md from the code, and the site, in site/; any broken link is an error
docs: .venv/docs
	$(BIN)/python docs/make_api.py
	$(BIN)/python docs/make_cli.py
	$(BIN)/python docs/check_manifests.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

.venv/docs: requirements-docs.txt .venv/installed
	$(BIN)/python -m pip install --quiet --requirement requirements-docs.txt
	touch $@

## bench: side by side with peers and with the disk's own speed: the cases of a few minutes, or all of them
bench: .venv/installed
	$(BIN)/python -m benchmarks large small start

bench-full: .venv/installed
	$(BIN)/python -m benchmarks

#: The commit to compare the working tree with.
REF ?= HEAD

## bench-compare: time the main cases of the commit REF and of the working tree in turn, and say what is outside noise
bench-compare: .venv/installed
	$(BIN)/python -m benchmarks.compare $(REF)

## bench-objects: CPU time and memory at an object store, against boto3, obstore, s3torchconnector and DCP with s3fs
bench-objects: .bench-objects/installed
	PYTHONPATH=.bench-objects $(BIN)/python -m benchmarks object-store object-store-2-ranks --rounds 3 --gigabytes 1

#: In a directory of their own, because botocore wants an older python-dateutil than .venv has.
.bench-objects/installed: requirements-bench-objects.txt .venv/installed
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .bench-objects --requirement requirements-bench-objects.txt
	touch $@

#: The peer in the tables of published weights, which nothing else uses.
.bench-published/installed: requirements-bench-published.txt .venv/installed
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .bench-published --requirement requirements-bench-published.txt
	touch $@

## crash: cut saves of every kind at every operation, and look at what a crash may leave
crash: .venv/installed
	$(BIN)/python -m campaigns.crash

## kill: ranks killed and stopped at every point of a save and a load
kill: .venv/installed
	$(BIN)/python -m campaigns.kill
	$(BIN)/python -m campaigns.stop

## faults: every call to the file system fails once; everything changes right after an asynchronous save
faults: .venv/installed
	$(BIN)/python -m campaigns.faults
	$(BIN)/python -m campaigns.torn
	$(BIN)/python -m campaigns.torn --staging overlapped

## fuzz: change checkpoints of every format at random, and read them
fuzz: .venv/installed
	$(BIN)/python -m campaigns.fuzz

#: Which mutants are drawn.
SEED ?= 0

## mutate: change the core at random, 60 times, and look for changes that no test notices; goes on where it ended
mutate: .venv/installed
	$(BIN)/python -m campaigns.mutate --seed $(SEED) --check

## jobs: several jobs at one folder, which save, overwrite, remove and read as fast as they can
jobs: .venv/installed
	TMPDIR=/dev/shm $(BIN)/python -m campaigns.side_by_side

## large: a model of 3 GB straight into the shards of four ranks, and a tensor of 3 GB
large: .venv/installed
	$(BIN)/python -m campaigns.large

## hosts: several kernels with caches and locks of their own share a folder over NFS: see docs/test-bed.md
hosts: .venv/installed
	$(BIN)/python -m campaigns.hosts setup
	for scene in pages locks leftovers names faults saves folders jobs failures histories; do $(BIN)/python -m campaigns.hosts $$scene || exit 1; done

## slurm: the guide's scripts in a real Slurm, in namespaces of this machine; needs root and Debian's packages
slurm: .venv/installed
	$(BIN)/python -m campaigns.slurm setup
	$(BIN)/python -m campaigns.slurm scenes
	$(BIN)/python -m campaigns.slurm histories --events 100

## tier: measure loads from the memory of four hosts, what saves cost, and a frozen disk; needs root and 16 GB of memory
tier: .venv/installed
	$(BIN)/python -m campaigns.tier figures

## tier-kill: kill and stop ranks and hosts of jobs with a local tier, at random moments, over 300 times
tier-kill: .venv/installed
	TMPDIR=/dev/shm $(BIN)/python -m campaigns.tier.histories

## gcs: the suite of all stores with a real bucket of Google Cloud Storage, BUCKET=name; it deletes what it writes
gcs: .venv/installed
	RANKLESS_TEST_GCS=$(BUCKET) $(BIN)/python -m pytest tests/unit/storage/test_store_conformance.py -k "real and google"

#: How many chains of jobs run at each server.
CHAINS ?= 10

## objects: real object stores: Swift, Ceph, LocalStack and Azurite are installed into .objects; jobs that save are killed and stopped
objects: .venv/installed
	$(BIN)/python -m campaigns.objects $(SERVERS) --chains $(CHAINS)

## run-histories: random histories of runs, whose jobs are killed, stopped, copied, moved and rolled back, against an oracle
run-histories: .venv/installed
	$(BIN)/python -m campaigns.run_histories

## published-histories: random histories of published weights, whose publishers and followers are killed, against an oracle
published-histories: .venv/installed
	$(BIN)/python -m campaigns.published_weights

## bench-published: sizes, speeds and stalls of published weights, against XOR with zstd, and save_model
bench-published: .bench-published/installed
	PYTHONPATH=.bench-published $(BIN)/python -m benchmarks.weight_versions size
	PYTHONPATH=.bench-published $(BIN)/python -m benchmarks.weight_versions speed
	PYTHONPATH=.bench-published $(BIN)/python -m benchmarks.weight_versions stall

## histories: saves into object stores in memory die, lose a reply, or stop while another process goes on, at every request
histories: .venv/installed
	$(BIN)/python -m campaigns.object_histories

.venv/installed: requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt --editable .
	touch $@

clean:
	rm -rf .venv .venv-colossalai .dist dist .accelerator site demo_run crash_violations fuzz_violations mutants.jsonl .coverage* .mypy_cache .pytest_cache .ruff_cache .hypothesis
