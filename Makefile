# make demo    quantize, compile and run a small language model that ships with the repository
# make test    linters, type checker, documentation and tests
# make test-slow   the same tests and those that take minutes: every instance, every broken kernel (make test tries one of a kind)
# make vllm    the tests inside vLLM, in an environment of their own in .venv-vllm, over that of .venv (SLOW=--slow: the soak test too)
# make wheel   the wheel that users install, with compiled kernels for every architecture, into dist/ (needs nvcc 13; minutes)
# make docs    the pages of docs/ and the API reference, into build/docs (index.html)
#
# All make an environment in .venv first (once; again when pyproject.toml changes); demo needs the smaller part of it. To use another:
#   PYTHON=python3.12     the Python to build it from; if that one has torch >= 2.11 (your CUDA build), it is used
#   VENV=/some/where      where it lies; if it exists already and has torch >= 2.11, that one is used
#   TORCH=torch==2.11.0   what to install when neither has one; pip's options may follow
#   TEST="-m gpu"         arguments of pytest (WORKERS=0: one process)      DEMO="--model smollm2"   of the quickstart

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
WORKERS ?= 2
TEST ?=
DEMO ?=
VLLM_VENV ?= .venv-vllm
VLLM ?= 0.32.0
VLLM_TEST ?=
BIN := $(VENV)/bin
READY := $(VENV)/.fp4_ready
TOOLS := $(VENV)/.fp4_tools

.PHONY: demo test test-slow lint pytest vllm vllm-environment docs readme activations support wheel clean

demo: $(READY)
	$(BIN)/python examples/quickstart.py $(DEMO)

test: lint docs pytest

lint: $(TOOLS)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

pytest: $(TOOLS)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(TEST)

test-slow: $(TOOLS)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --slow $(TEST)

vllm-environment: $(VLLM_VENV)/.fp4_ready

vllm: $(VLLM_VENV)/.fp4_ready
	OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal lowering_tests/vllm $(SLOW) $(VLLM_TEST)

$(VLLM_VENV)/.fp4_ready: pyproject.toml .ci/vllm.py $(TOOLS)
	$(PYTHON) .ci/vllm.py $(VLLM_VENV) $(BIN)/python $(VLLM)
	@touch $@

docs: $(TOOLS)
	$(BIN)/python -m sphinx --fail-on-warning --nitpicky --fresh-env --quiet -b html docs build/docs

$(READY): pyproject.toml setup.py .ci/environment.py .ci/constraints.txt
	$(PYTHON) .ci/environment.py $(VENV) "$(TORCH)" models
	@touch $@

$(TOOLS): $(READY)
	$(PYTHON) .ci/environment.py $(VENV) "$(TORCH)" models,test,docs,dev
	@touch $@

readme: $(TOOLS)
	$(BIN)/python .ci/readme.py

activations: $(TOOLS)
	$(BIN)/python .ci/activations.py

wheel: $(TOOLS)
	$(BIN)/python .ci/wheel.py

support: $(TOOLS)
	$(BIN)/python .ci/support.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info
