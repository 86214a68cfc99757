# Two commands matter: `make report` and `make test`. Both set up what they need.
# The active Python is used where it already has everything; otherwise .venv is made.

PROFILE ?= quick
SETUP := .venv/.ready

# the active environment if all of it is installed there (a conda user's), else our own;
# asked from / so that the checkout itself does not count as an installation
NEEDED := decodebench torch jupyterlab matplotlib pandas pyarrow papermill ipywidgets nbconvert tqdm pytest hypothesis ruff mypy
ACTIVE := $(shell cd / && python3 -c "from importlib.util import find_spec; print(all(map(find_spec, '$(NEEDED)'.split())))" 2>/dev/null)
ifeq ($(ACTIVE),True)
PY := python3
SETUP :=
else
PY := .venv/bin/python
endif

.PHONY: report gpu test test-vllm lint lab venv clean

report: $(SETUP)
	$(PY) -m decodebench report --profile $(PROFILE)

# on a GPU machine, in the environment whose torch uses the card (README, "On a GPU"); sets up nothing
gpu:
	python3 -m decodebench gpu

# passive: OpenMP threads that spin while they wait make tests several times slower on a busy machine
test: $(SETUP)
	OMP_WAIT_POLICY=passive $(PY) -m pytest -q

# the same connector inside vLLM, each release in an environment of its own (vLLM pins what it needs);
# VLLM=0.31.0 takes another release, VLLM=all every one that the connector knows
VLLM ?= 0.32.0
VLLM_RELEASES := 0.30.0 0.31.0 0.32.0 0.33.0
VLLM_VENV := .venv-vllm$(patsubst %,-%,$(filter-out 0.32.0,$(VLLM)))

ifeq ($(VLLM),all)
test-vllm: $(VLLM_RELEASES:%=test-vllm-%)
test-vllm-%:
	$(MAKE) test-vllm VLLM=$*
else
test-vllm: $(VLLM_VENV)/.ready
	OMP_WAIT_POLICY=passive $(VLLM_VENV)/bin/python -m pytest -q tests/engine
endif

# rooms that must be free of mypy's errors; the others must not gain any
TYPED := decodebench/models decodebench/layout decodebench/coverage

lint: $(SETUP)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy $(TYPED)

lab: $(SETUP)
	$(PY) -m jupyterlab notebooks

venv: $(SETUP)

.venv/.ready: pyproject.toml constraints.txt
	python3 -c "import sys; sys.exit(sys.version_info < (3, 11) and 'decodebench needs Python 3.11 or newer')"
	test -x .venv/bin/python || python3 -m venv .venv
	.venv/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $@

$(VLLM_VENV)/.ready: pyproject.toml tests/engine/install.py
	test -x $(VLLM_VENV)/bin/python || python3 -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python tests/engine/install.py $(VLLM)
	$(VLLM_VENV)/bin/python -m pip install -q --disable-pip-version-check --no-deps -e .
	touch $@

clean:
	rm -rf .venv .venv-vllm .venv-vllm-* reports
