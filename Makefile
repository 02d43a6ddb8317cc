# `make demo` and `make test` do all the set-up themselves, in .venv.

SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
NEWEST := build/newest
JAX := jax==0.11.2 jaxlib==0.11.2 flax==0.12.12

# The first interpreter that really starts (a version manager's shim may not), is new enough, and
# can make a virtual environment.
CANDIDATES := python3.12 python3.13 python3.14 python3 \
  $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.1[2-9]*/bin/python3)
PYTHON ?= $(shell for p in $(CANDIDATES); do \
  "$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null \
  && { echo "$$p"; break; }; done)

# Demo and tests run on virtual CPU devices; the CUDA plugin, where tests install it, only compiles.
CPU := JAX_PLATFORMS=cpu JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1
SOURCES := pyproject.toml ffi/CMakeLists.txt $(wildcard ffi/*.cc ffi/*.h)

.PHONY: help demo test lint unit native bazel protocol newest gpu clean

help:
	@echo 'make demo      set up, then run one layer end to end on this machine'
	@echo 'make test      set up, then lint, unit tests, native tests, protocol check'
	@echo 'make gpu       set up for the GPU here, then the tests that need one, and a report'
	@echo 'make lint      ruff format, ruff check, pyright'
	@echo 'make clean     remove what the above made'

demo: $(VENV)/.demo
	$(CPU) $(VENV)/bin/k3jax demo

test: lint native bazel protocol unit newest

lint: $(VENV)/.test
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(PY)

unit: $(VENV)/.test
	$(CPU) $(PY) -m pytest -n 2 --dist worksteal --durations 15

native: $(VENV)/.test
	$(VENV)/bin/cmake -S ffi -B build/native -DPython_EXECUTABLE=$(abspath $(PY))
	$(VENV)/bin/cmake --build build/native -j 2
	cd build/native && $(abspath $(VENV))/bin/ctest --output-on-failure

bazel: $(VENV)/.test
	@if ! command -v bazel >/dev/null; then \
	  echo 'SKIPPED bazel: not installed (Debian: apt-get install bazel-bootstrap bazel-rules-java' \
	    'bazel-rules-proto); `make native` runs the same tests'; \
	else \
	  bazel test --repo_env=PYTHON_BIN_PATH=$(abspath $(PY)) //ffi/... && bazel shutdown; \
	fi

protocol:
	@if ! command -v spin >/dev/null; then \
	  echo 'SKIPPED protocol: no model checker (Debian: apt-get install spin)'; \
	else \
	  sh tests/protocol/check.sh; \
	fi

# The library, built against the oldest supported jaxlib, under the newest one: compiled programs for
# GPUs that are not here. The other packages are borrowed from .venv.
newest: $(NEWEST)/.ready
	$(CPU) $(NEWEST)/bin/python -m pytest -q tests/runtime/test_device_free.py tests/runtime/test_ffi.py

$(NEWEST)/.ready: $(VENV)/.test
	$(PY) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet jax==0.12.0.1 jaxlib==0.12.0.1
	$(NEWEST)/bin/python -m pip install --quiet --no-deps \
	  jax-cuda13-plugin==0.12.0.1 jax-cuda13-pjrt==0.12.0.1
	$(NEWEST)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  | { read -r site; $(PY) -c 'import sysconfig; print("import site;", \
	  "site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > "$$site/zz_borrowed.pth"; }
	touch $@

gpu: $(VENV)/.gpu
	mkdir -p build/gpu
	JAX_PLATFORMS=cuda,cpu $(PY) -m pytest -m gpu --junitxml build/gpu/tests.xml
	JAX_PLATFORMS=cuda,cpu $(VENV)/bin/k3jax doctor --json > build/gpu/doctor.json
	JAX_PLATFORMS=cuda,cpu $(VENV)/bin/k3jax bench experts --tp 8 --peers none --json build/gpu/experts.json

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo 'k3jax needs Python 3.12 or newer with venv and pip: install it' \
	  '(Debian or Ubuntu: apt-get install python3.12 python3.12-venv; elsewhere pyenv install 3.12),' \
	  'or name one: make PYTHON=/path/to/python3.12'; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(SOURCES) | $(VENV)/bin/python
	$(PY) -m pip install --quiet $(JAX) --editable .
	touch $@

$(VENV)/.test: $(SOURCES) | $(VENV)/bin/python
	$(PY) -m pip install --quiet --editable '.[test,dev]'
	$(PY) -m pip install --quiet --no-deps jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2
	touch $@ $(VENV)/.demo

$(VENV)/.gpu: $(SOURCES) | $(VENV)/bin/python
	$(PY) -m pip install --quiet --editable '.[cuda13,test]'
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist bazel-* .pytest_cache .ruff_cache
