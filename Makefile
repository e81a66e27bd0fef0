# make setup | demo | test | lint | fuzz | bench: each sets up what it needs in .venv
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint format fuzz bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e '.[train,analysis,test]'
	touch $@

demo: setup
	$(BIN)/python train.py --workers 1 2 4 --codecs dense isgq --out runs/demo

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

fuzz: setup
	$(BIN)/python -m tests.fuzz_wire --mutations 100000

bench: setup
	$(BIN)/python -m benchmarks.codecs

clean:
	rm -rf build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache
