# make demo   what Foveate is, with images and a video of this machine     make lint    ruff and pyright
# make test   lint, types and the fast tests                            make bench   time a Flux step, dense and sparse
# make docs   the documentation as a site in site/                      make test-all   the same and the slow tests
# make test-quantised   methods on quantised weights, with packages that the other tests do without
#
# Each makes .venv first if it is missing. PYTHON= picks the interpreter (3.11 or newer), TORCH= the torch requirement.
PYTHON ?= python3
TORCH ?= torch
BIN := .venv/bin
unexport PYTHONDONTWRITEBYTECODE # tests start three times as fast from what they compiled before

.PHONY: demo test fast test-all test-quantised lint bench docs

demo: .venv/foveate
	$(BIN)/foveate demo page --out demo

test: .venv/dev
	@$(MAKE) --jobs 2 lint fast # types are checked beside the tests

fast:
	$(BIN)/pytest -n 2 --dist worksteal

test-all: test
	$(BIN)/pytest -n 2 --dist worksteal -m "slow and not gpu"

test-quantised: .venv/dev
	$(BIN)/pip install -q -e ".[quantised]"
	$(BIN)/pytest -n 2 -m slow tests/diffusers/test_quantised.py

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: .venv/foveate
	$(BIN)/foveate bench step

docs: .venv/docs
	$(BIN)/mkdocs build --strict

.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Foveate needs Python 3.11 or newer; pass one with PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/foveate: pyproject.toml | .venv/bin/pip
	$(BIN)/pip install -q "$(TORCH)"
	$(BIN)/pip install -q -e models -e ".[apps,diffusers,video]"
	@touch $@

.venv/dev: .venv/foveate
	$(BIN)/pip install -q -e ".[dev]"
	@touch $@

.venv/docs: .venv/dev
	$(BIN)/pip install -q -e ".[docs]"
	@touch $@
