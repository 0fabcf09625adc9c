# make demo and make test do all their set-up themselves.
VENV ?= .venv
PY := $(VENV)/bin/python
# PyPI's plain `torch` brings several gigabytes of CUDA; this pin is small where an index has a CPU build.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.8.0

.PHONY: setup check test demo bench docs clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	test -x $(PY) || python3 -m venv $(VENV)
	$(VENV)/bin/pip install -q --disable-pip-version-check $(TORCH) $(TRITON)
	$(VENV)/bin/pip install -q --disable-pip-version-check -e '.[test,check,report]'
	touch $@

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(PY) -m pytest tests/test_architecture.py

# One thread a process: two busy pools of threads on the same cores wait for each other.
test: export OMP_NUM_THREADS = 1
test: setup
	TRITON_INTERPRET=1 $(PY) -m pytest -n 2 tests/kernels
	$(PY) -m pytest -n 2

demo: setup
	$(PY) examples/demo.py

# On a GPU: times every op beside torch, a copy and plain Triton, and appends to benchmarks/results/speed.jsonl.
bench: setup
	$(PY) -m hadaquant bench

clean:
	rm -rf $(VENV) build dist demo src/*.egg-info

docs: setup
	$(PY) docs/generate.py
