# Two commands matter: `make report` and `make test`. Both set up what they need.
# The active Python is used where it already has everything; otherwise .venv is made.

PROFILE ?= quick
SETUP := .venv/.ready

# the active environment if all of it is installed there (a conda user's), else our own;
# asked from / so that the checkout itself does not count as an installation
NEEDED := decodebench torch jupyterlab matplotlib pandas pyarrow papermill ipywidgets nbconvert tqdm pytest hypothesis
ACTIVE := $(shell cd / && python3 -c "from importlib.util import find_spec; print(all(map(find_spec, '$(NEEDED)'.split())))" 2>/dev/null)
ifeq ($(ACTIVE),True)
PY := python3
SETUP :=
else
PY := .venv/bin/python
endif

.PHONY: report test lab venv clean

report: $(SETUP)
	$(PY) -m decodebench report --profile $(PROFILE)

test: $(SETUP)
	$(PY) -m pytest -q

lab: $(SETUP)
	$(PY) -m jupyterlab notebooks

venv: $(SETUP)

# torch first and pinned: an open range would pull a CUDA build of several gigabytes
.venv/.ready: pyproject.toml
	python3 -c "import sys; sys.exit(sys.version_info < (3, 11) and 'decodebench needs Python 3.11 or newer')"
	test -x .venv/bin/python || python3 -m venv .venv
	.venv/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0
	.venv/bin/python -m pip install -q --disable-pip-version-check -e ".[test]"
	touch $@

clean:
	rm -rf .venv reports
