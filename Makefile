# Everything lives in .venv; `make demo` and `make test` are all a newcomer needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test floor-test app-test docs docs-test lint hf-tests client-tests ray-tests benchmark notebooks dist clean
.DELETE_ON_ERROR:

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "lex_hf needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[cli,eval,plot,train]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@ $(VENV)/.installed

demo: $(VENV)/.installed ## train a tiny LEX, evaluate it far beyond its training length, generate
	$(BIN)/lex-hf demo

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A file stays in one process, as its models do; --maxprocesses bounds the memory on machines with many cores.
test: lint ## lint, types, and the whole test suite; no network
	$(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --dist loadfile

# The oldest versions that pyproject.toml allows, in an environment of their own.
FLOOR := $(VENV)-floor
CORE := tests/model tests/rope tests/inference tests/evaluation tests/data tests/training tests/test_extras.py tests/test_imports.py

$(FLOOR)/.installed: pyproject.toml constraints-floor.txt
	$(PYTHON) -m venv $(FLOOR)
	$(FLOOR)/bin/python -m pip install --quiet --constraint constraints-floor.txt --editable '.[cli,eval,plot,train]' hypothesis psutil pytest pytest-xdist
	touch $@

# Warnings of old libraries are none of ours.
floor-test: $(FLOOR)/.installed ## tests of all but the Hub, the papers and the command line, with the oldest versions that are allowed; downloads PyTorch
	$(FLOOR)/bin/python -m pytest -W default --numprocesses logical --maxprocesses 8 --dist loadfile $(CORE)

# An environment of its own: what drives a browser is for this alone. Chromium is that of the system, or Playwright's.
APP := $(VENV)-app
$(APP)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(APP)
	$(APP)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' playwright
	touch $@

app-test: $(APP)/.installed ## the page in a real browser, which must be there (apt install chromium); pictures are left in build/app
	$(APP)/bin/python -m pytest -rs tests/app

# An environment of its own, without PyTorch: docstrings are read, not run.
SITE := $(VENV)-docs
$(SITE)/.installed: constraints.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --constraint constraints.txt mkdocs-material 'mkdocstrings[python]' ruff
	touch $@

docs: $(SITE)/.installed ## the documentation as a site, in build/site; broken links and unknown names fail
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict

docs-test: $(VENV)/.installed-dev ## run the code on pages and all notebooks, in build/notebooks; ten minutes
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,notebooks]'
	$(BIN)/python -m pytest tests/test_pages.py tests/test_notebooks.py tests/hub/test_zoo.py
	mkdir -p build && rm -rf build/notebooks && cp -R notebooks build/notebooks && rm -rf build/model_cards && cp -R model_cards build/
	TQDM_DISABLE=1 PYTHONWARNINGS='ignore:IProgress not found' $(BIN)/jupyter nbconvert --to notebook --execute --inplace build/notebooks/*.ipynb

# One thread: on cores that are shared, the threads of such small models mostly wait for each other.
hf-tests: $(VENV)/.installed-dev ## transformers' own shared tests over the LEX classes; downloads them; about 20 minutes
	$(BIN)/python -m pip install --quiet --constraint constraints.txt parameterized torchao
	tests=$$($(BIN)/python tests/hf/fetch.py build/hf-tests) && \
	PYTHONPATH=$$tests OMP_NUM_THREADS=1 $(BIN)/python -m pytest -o addopts= -W ignore -q -rs tests/hf/suite_lex.py

client-tests: $(VENV)/.installed-dev ## PEFT, TRL, torchao: installs them
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,clients]'
	$(BIN)/python -m pytest tests/inference/test_clients_extra.py

ray-tests: $(VENV)/.installed-dev ## two replicas of a server under Ray Serve, one of which is killed: installs Ray
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,ray]'
	$(BIN)/python -m pytest -rs tests/inference/test_replicas.py

benchmark: $(VENV)/.installed-dev ## time and memory beside other models, on a quiet machine
	$(BIN)/python benchmarks/run.py

notebooks: $(VENV)/.installed-dev ## run the notebooks again, in place
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[notebooks]'
	TQDM_DISABLE=1 PYTHONWARNINGS='ignore:IProgress not found' $(BIN)/jupyter nbconvert --to notebook --execute --inplace notebooks/*.ipynb

# From what is committed: nothing else that lies in the folder gets in. Neither PyTorch nor the package is installed.
dist: | $(BIN)/python ## the source distribution and the wheel of the last commit, in dist, and checked; uploads nothing
	$(BIN)/python -m pip install --quiet --constraint constraints.txt build twine
	rm -rf dist build/dist && mkdir -p build/dist
	git archive HEAD | tar -xC build/dist
	$(BIN)/python -m build --dependency-constraints-txt constraints.txt --outdir dist build/dist
	$(BIN)/python -m twine check --strict dist/*
	@git diff --quiet HEAD || echo 'Changes that are not committed are not in it.'

clean:
	rm -rf $(VENV) $(APP) $(FLOOR) $(SITE) build dist demo_output .pytest_cache .mypy_cache .ruff_cache .hypothesis
