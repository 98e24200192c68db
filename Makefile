# Everything a fresh machine with Python 3.11, 3.12 or 3.13, pip, git and make needs. All targets create and use ./.venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
BIN := .venv/bin
export FLWR_TELEMETRY_ENABLED = 0
export FLWR_DISABLE_UPDATE_CHECK = 1
export RAY_USAGE_STATS_ENABLED = 0
export NO_MKDOCS_2_WARNING = 1
# Empty: the many processes of the tests share compiled modules.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo test near laws compat check slow network pages bench bench-simulation bench-peers strangers gpu docs generate dist clean certs lock sbom compose

BASE ?= HEAD
NODES ?= 3
DRAWS ?= 1000
HOSTS ?=
ARGS ?=
SETS ?=
KEEP ?=
DATA ?=
PEERS ?=
PEER_PYTHON ?=
PEER_ENV ?= ../fedbn-flwr-peers

demo: .venv/installed
	$(BIN)/python -m apps.main.demo

test: .venv/installed-dev
	$(BIN)/python -m pytest -n auto --dist loadgroup

# The tests that run a changed line, by a map of the suite (.testmondata). The first call runs everything, and makes the map.
near: .venv/installed-dev
	$(BIN)/python -m pytest --testmon -n auto --dist loadgroup $(ARGS)

# Random federations against the reference of tests/reference, with other seeds than the suite's. Finished blocks are
# kept in runs/laws.jsonl, so a later call continues: make laws DRAWS=10000 ARGS="--processes 1 --first 1000"
laws: .venv/installed-dev
	$(BIN)/python -m tests.reference.laws --draws $(DRAWS) $(ARGS)

# The core's suite with each Python found, the oldest and the newest Flower, and torch 2.6, 2.8 and the newest, into
# The table of versions in docs/performance.md: make compat ARGS="tests/strategies" SETS="3.12/1.28/2.8 3.12/nightly/newest" KEEP=1
compat: .venv/installed
	$(BIN)/python benchmarks/compat.py $(if $(KEEP),--keep) $(SETS:%=--set %) -- $(ARGS)

slow: .venv/installed-dev
	$(BIN)/python -m pytest -m "slow and not network"

# Every test over real SuperLinks and SuperNodes, also those too slow for the suite.
network: .venv/installed-dev
	$(BIN)/python -m pytest -m network

# The commands and programs of README and every page, in their order, in one clone: make pages ARGS="--clone runs/clone"
pages: .venv/installed-dev
	$(BIN)/python benchmarks/pages.py --at-once $(ARGS)

# Every benchmark, its figures into docs/performance.yaml, tables and charts; 40 quiet minutes on two cores. Without DATA the images are random;
# without PEERS and PEER_PYTHON the other packages are named as missing (benchmarks/simulation.py says what they need):
# make bench DATA=DIR PEERS=DIR PEER_PYTHON=../fedbn-flwr-peers/bin/python
# The comparison with other packages alone, with the page's tables and charts:
# make bench-simulation DATA=DIR PEER_PYTHON=... ARGS="--turns 3 --rounds 2 --only fedbn --only cifar10"
bench: bench-simulation
	$(BIN)/python benchmarks/fedtan.py --write docs/performance.md $(if $(DATA),--data-dir "$(DATA)")
	$(BIN)/python benchmarks/startup.py --write benchmarks/results.md
	$(BIN)/python benchmarks/methods.py --write benchmarks/results.md
	$(BIN)/python benchmarks/scale.py --write benchmarks/results.md
	@if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; \
		then $(BIN)/python benchmarks/gpu.py --write benchmarks/results.md; \
		else echo "benchmarks/gpu.py is left out: there is no CUDA device here"; fi

bench-simulation: .venv/installed
	$(BIN)/python benchmarks/simulation.py --write docs/performance.yaml $(if $(DATA),--data-dir "$(DATA)") \
		$(if $(PEERS),--peers "$(PEERS)") $(if $(PEER_PYTHON),--peer-python "$(PEER_PYTHON)") $(ARGS)
	$(BIN)/python docs/generate
	$(BIN)/python docs/pictures.py

# The peers that are packages, and what PFLlib and FL-bench import, for PEER_PYTHON: an environment of 0.2 GB beside the
# repository, which takes torch, Flower and all else that .venv has from there, so that every contender has the same torch: make bench-peers PEER_ENV=DIR
bench-peers: .venv/installed
	$(BIN)/python -m venv "$(PEER_ENV)"
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> "$$("$(PEER_ENV)/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/of-fedbn-flwr.pth"
	"$(PEER_ENV)/bin/python" -m pip install --quiet --disable-pip-version-check pfl==0.6.0 fluke-fl==0.8.1 h5py nvidia-ml-py
	"$(PEER_ENV)/bin/python" -c "import fluke, h5py, hydra, pfl, pynvml, torch; print('torch', torch.__version__)"

# 40 models of torchvision and timm, in five ways, under four methods, each against plain torch; hours on one core. Less:
# make strangers ARGS="--models 8 --way plain --size 32"
strangers: .venv/installed
	$(BIN)/python benchmarks/strangers.py $(ARGS)

# The tests that need a GPU, and what it is worth; under eight minutes for the benchmark.
gpu: .venv/installed-dev
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python benchmarks/gpu.py

# Keys and certificates for docker-compose.yml, and .env: make certs NODES=3 HOSTS=fl.example.org,192.0.2.7
# Later on: make certs ARGS="--add 4", make certs ARGS=--renew. It needs openssl and ssh-keygen, and no Python.
certs:
	docker/certs.sh certs --nodes $(NODES) --hosts "$(HOSTS)" $(ARGS)

# The versions and hashes of what docker/Dockerfile installs beside torch: after a change of pyproject.toml or constraints.txt.
LOCK = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header \
	--no-annotate --constraint constraints.txt
WITH_TORCH = torch torchvision triton sympy mpmath networkx setuptools cuda-bindings cuda-pathfinder cuda-toolkit \
	$(addprefix nvidia-,cublas cuda-cccl cuda-cupti cuda-nvrtc cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse \
	cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx)
lock: .venv/installed
	echo "flwr>=1.41,<1.44" | $(LOCK) --output-file docker/services.lock -
	echo "hatchling>=1.25,<2" | $(LOCK) --extra lab --output-file docker/apps.lock pyproject.toml - \
		$(WITH_TORCH:%=--no-emit-package %)

# Every package of the app's image, as sbom.json; needs a Docker engine. The variables are those of docker/Dockerfile.
sbom:
	docker build --file docker/Dockerfile --target sbom --output . $(if $(FEDBN_BASE),--build-arg "BASE=$(FEDBN_BASE)") \
		$(if $(FEDBN_TORCH_INDEX),--build-arg "TORCH_INDEX=$(FEDBN_TORCH_INDEX)") \
		$(if $(FEDBN_EXTRAS),--build-arg "EXTRAS=$(FEDBN_EXTRAS)") .

# docker-compose.yml and docker/machine-*.yml for another number of nodes: make compose NODES=5
compose: .venv/installed
	$(BIN)/python docker/compose_nodes.py --nodes $(NODES)

# Linters, types and the score of the prose: make check BASE=main shows each file that differs from main, before and after
check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python benchmarks/prose.py --base $(BASE)

# Everything that is derived from the code: config defaults, tables, the pages of config keys and methods.
generate: .venv/installed
	$(BIN)/python docs/generate

docs: .venv/installed-docs
	$(BIN)/mkdocs build --strict

dist: .venv/installed-dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[lab]"
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[lab,dev]"
	touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[lab,docs]"
	touch $@

clean:
	rm -rf .venv .compat dist site runs/demo-*
