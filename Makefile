# make needle   the main experiment, from nothing: environment, then the driver
# make test     tests that take minutes         make test-all   every test
# make check    lint                            make train      train the tiny checkpoint again
# make aot-tpu  compile every kernel and the decode step with a TPU's own compiler, without a TPU; aot-h200: an H200's
# make gpu-check  on a machine with a Hopper GPU: the kernels' contract, the compile report, the benchmark
PYTHON ?= python3
VENV ?= .venv
ARGS ?=

RUN := $(VENV)/bin/python
STAMP := $(VENV)/requirements.stamp
SUPPORTED := import sys; (3, 11) <= sys.version_info < (3, 14) or sys.exit( \
  f"Python 3.11 to 3.13 is needed, $(PYTHON) is {sys.version.split()[0]}: say make PYTHON=python3.13")

TPUS ?= tpu:v5e:2x2 tpu:v5p:2x2x1 tpu:v6e:2x2

.PHONY: needle train test test-all check aot-tpu aot-h200 bench gpu-check clean

needle: $(STAMP)
	$(RUN) -m experiments.needle --config=configs/needle.py $(ARGS)

bench: $(STAMP)
	$(RUN) -m experiments.bench --config=configs/bench.py $(ARGS)

train: $(STAMP)
	$(RUN) -m experiments.train --config=configs/train_tiny.py $(ARGS)

test: $(STAMP)
	$(RUN) -m pytest -m "not slow" $(ARGS)

test-all: $(STAMP)
	$(RUN) -m pytest $(ARGS)

check: $(STAMP)
	$(RUN) -m ruff check .

aot-tpu: $(STAMP)
	$(RUN) -m experiments.compilers tpu
	@for target in $(TPUS); do $(RUN) -m experiments.compile_report --target=$$target $(ARGS) || exit 1; done

aot-h200: $(STAMP)
	$(RUN) -m experiments.compilers h200
	$(RUN) -m experiments.compile_report --target=h200 $(ARGS)

gpu-check: # with the jax of $(PYTHON), which knows its GPU: no environment is made
	$(PYTHON) -m experiments.gpu_check $(ARGS)

$(STAMP): requirements.txt
	@$(PYTHON) -c '$(SUPPORTED)'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -r requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) .venv-newest .aot .pytest_cache .ruff_cache .hypothesis
