# make demo   fresh Debian or Ubuntu machine -> synthetic training on an uneven plan of seven ranks
# make test   what the tests need, then all of them, live Slurm 22.05 and 24.11 included (as root)
# make test-releases   configuration, jobs, training and lost nodes on live Slurm 20.11, 22.05, 24.11 and 26.05
# make test-guide   the set-up guide, typed block by block on three bare machines with systemd (as root)
# make test-containers   two hosts in a container engine, started by the tests (as root, with dockerd and debootstrap)
# make docs   the documentation site, into build/docs
# make audit  known vulnerabilities of what is installed, from pypi.org: before a release
# make fresh  make demo and make test in a new Debian root (as root, with debootstrap): before a release

PYTHON ?= python3
VENV ?= .venv
IN_VENV := $(VENV)/bin/python
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
TEST_PACKAGES := slurm-wlm slurmdbd mariadb-server-core mariadb-client-core munge iproute2 \
  debootstrap openssh-server openssh-client shellcheck
# Half of the live tests wait for Slurm: four processes suit two cores.
PYTEST_OPTIONS ?= -n 4 --no-loadscope-reorder
# Bytecode is kept, also where the shell says otherwise: each rank and each command of the tests
# would compile the package again, and each test process the tests.
export PYTHONDONTWRITEBYTECODE :=

# 100,000 hostile files and outputs of programs; some minutes
fuzz: $(VENV)/installed-test
	DDP_SLURM_FUZZ=100000 $(IN_VENV) -m pytest --timeout=0 tests/unit/test_fuzz.py \
	  tests/training/test_fuzz_snapshots.py

.PHONY: fuzz demo test test-releases test-guide test-containers fresh lint secret_scan audit docs clean

demo: $(VENV)/installed-train
	cd synthetic_data_example && CUDA_VISIBLE_DEVICES= ../$(IN_VENV) -m ddp_slurm.cli plan --job job.yaml
	cd synthetic_data_example && folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	  CUDA_VISIBLE_DEVICES= ../$(IN_VENV) -m ddp_slurm.submit --backend local --job job.yaml \
	  -- python train.py 5 1 --snapshot "$$folder/snapshot.pt"

test: $(VENV)/installed-test $(VENV)/installed-packages lint
	$(IN_VENV) -m pytest $(PYTEST_OPTIONS)

test-releases: $(VENV)/installed-test $(VENV)/installed-packages
	DDP_SLURM_TEST_RELEASES=all $(IN_VENV) -m pytest tests/slurm/test_releases.py \
	  tests/slurm/test_users_files.py tests/slurm/test_restarts.py

test-guide: $(VENV)/installed-test $(VENV)/installed-packages
	DDP_SLURM_TEST_GUIDE=1 $(IN_VENV) -m pytest -s tests/slurm/test_guide_walk.py

test-containers: $(VENV)/installed-test
	DDP_SLURM_TEST_CONTAINERS=1 $(IN_VENV) -m pytest tests/hosts/test_containers.py tests/hosts/test_image.py

fresh:
	tests/fresh_root.sh demo test

lint: $(VENV)/installed-test secret_scan
	$(IN_VENV) -m ruff check .
	$(IN_VENV) -m ruff format --check .
	$(IN_VENV) -m mypy
	@# The pieces in slurm/job are checked as the scripts that they make, in tests/unit/golden.
	shellcheck .ci/run $$(git ls-files '*.sh' '*.sbatch' ':!slurm/job')

# Passwords, tokens and keys in the files of the repository. Needs no network.
secret_scan: $(VENV)/installed-test
	git ls-files -z | xargs -0 $(VENV)/bin/detect-secrets-hook # pragma: allowlist secret

# --strict: a package of which pypi.org knows nothing is an error, as is an index without such records.
audit: $(VENV)/installed-test $(VENV)/installed-audit secret_scan
	$(IN_VENV) -m pip freeze --exclude-editable | $(IN_VENV) -m pip_audit --strict --no-deps \
	  --disable-pip --requirement /dev/stdin

docs: $(VENV)/installed-test
	$(IN_VENV) -m sphinx --quiet --fail-on-warning --keep-going docs build/docs

$(VENV)/installed-train: setup.cfg | $(VENV)/bin/pip
	$(IN_VENV) -m pip install --quiet --editable '.[train]'
	touch $@

$(VENV)/installed-test: setup.cfg | $(VENV)/bin/pip
	$(IN_VENV) -m pip install --quiet --editable '.[test]'
	touch $@

$(VENV)/installed-audit: setup.cfg | $(VENV)/bin/pip
	$(IN_VENV) -m pip install --quiet --editable '.[audit]'
	touch $@

# Debian and Ubuntu ship Python without venv.
$(VENV)/bin/pip:
	$(PYTHON) -c 'import ensurepip, venv' || { $(SUDO) apt-get update && $(SUDO) apt-get install --yes python3-venv; }
	$(PYTHON) -m venv $(VENV)
	$(IN_VENV) -m pip install --quiet --upgrade pip 'setuptools>=64'

# Only where one is missing: the daemons themselves are started by the tests, each in a lab of its own.
$(VENV)/installed-packages: Makefile | $(VENV)/bin/pip
	dpkg --status $(TEST_PACKAGES) >/dev/null 2>&1 || { $(SUDO) apt-get update && \
	  $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $(TEST_PACKAGES); }
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
