# Everything a person or CI does here, on a machine with nothing but Python >= 3.11 and make.
PY ?= python3
V := .venv
O := .venv-oracle
BIN := $(V)/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP := -m pip install --quiet
# Container images often forbid bytecode; then every process that a test starts, and every test worker, compiles all of it anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test unit chromium check contract format docs results bench house slow soak mutants clean

demo: $(V)/.demo
	$(BIN)/vitlab demo

# One thread each: tests are many and small, and threads that wait for a busy core are far slower than none.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# A file stays in one of the processes, which keeps its fixtures; the order is that of tests/conftest.py, the longest first.
BY_FILE := --dist loadfile --no-loadscope-reorder

# The second part waits for other processes and for clocks: four at once keep two cores busy.
test: unit $(O)/.ready
	$(PYTEST) -n 4 $(BY_FILE) tests/contract tests/property tests/system tests/docs tests/gpu tests/browser
	OMP_NUM_THREADS=1 $(O)/bin/python -m pytest -n 2 --dist worksteal tests/oracle

unit: $(V)/.dev
	$(PYTEST) -n 2 $(BY_FILE) tests/unit tests/golden

# The browser of tests/browser, from Debian; elsewhere any Chromium on the path will do, or VITLAB_CHROMIUM.
chromium:
	command -v chromium || command -v google-chrome || apt-get install --yes --no-install-recommends chromium

check: $(V)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(BIN)/codespell

# What users are promised, and the tests that hold us to it; needs no environment.
contract:
	$(PY) tests/contract/interface.py

format: $(V)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(V)/.dev
	$(BIN)/python docs/execute.py --write
	$(BIN)/python docs/build.py

# The pages of the claims and the studies, from their records.
results: $(V)/.demo
	rm -rf docs/results/studies docs/results/claims.md docs/results/claims.svg
	$(BIN)/vitlab study report claims --records docs/results/records --out docs/results/claims.md
	for study in $$(basename --suffix .toml src/vitlab/studies/book/*.toml); do \
	    $(BIN)/vitlab study report $$study --records docs/results/records --out docs/results/studies/$$study.md || exit 1; done

bench: $(O)/.servers
	$(O)/bin/python bench/models.py --write docs/results/model-speed-cpu.md
	$(O)/bin/python bench/data.py --write docs/results/data-speed-cpu.md
	$(O)/bin/python bench/conversion.py --write docs/results/conversion-cpu.md
	$(O)/bin/python bench/training.py --write docs/results/train-speed-cpu.md
	$(O)/bin/python bench/serving.py --write docs/results/serving-cpu.md

# How much of the package a reader has to open, beside what is wanted; half a minute.
house: $(V)/.demo
	$(BIN)/python bench/house.py

# What `make test` leaves out for its length: variations of rules that it holds, large files, long runs. Load is tried alone.
slow: $(V)/.dev
	$(PYTEST) -n 2 $(BY_FILE) -m slow tests --ignore tests/oracle --ignore tests/system/test_server_load.py
	$(PYTEST) -m slow tests/system/test_server_load.py

# Every count in full; takes hours, and leaves its outcome in the docs.
soak: $(V)/.dev
	VITLAB_SOAK=1 $(PYTEST) -m '' tests --ignore tests/oracle --durations=0 -vv -s --junitxml=docs/results/soak.xml

# Each listed slip, made in a copy of the source, must be caught by the tests named beside it; some minutes.
mutants: $(V)/.dev
	$(BIN)/python tests/mutants/run.py

clean:
	rm -rf $(V) $(O) dist site

# --- set-up: each stamp is one pip call, repeated only when what it depends on changes ---

$(V)/.demo: pyproject.toml constraints.txt
	test -d $(V) || $(PY) -m venv $(V)
	$(BIN)/python $(PIP) -e '.[demo]'
	touch $@

$(V)/.dev: $(V)/.demo
	$(BIN)/python $(PIP) -e '.[dev]'
	touch $@

# timm needs torchvision, which would break other packages beside a CPU torch; so the peers live in an environment of their own,
# which sees the main one (and its torch) through a .pth file instead of installing a second copy.
$(O)/.ready: $(V)/.dev
	test -d $(O) || $(PY) -m venv $(O)
	site() { $$1 -c "import sysconfig; print(sysconfig.get_path('purelib'))"; }; \
	echo "import site; site.addsitedir('$$(site $(BIN)/python)')" > "$$(site $(O)/bin/python)/main-environment.pth"
	$(O)/bin/python $(PIP) timm transformers accelerate
	touch $@

# Peers of the server, for `make bench` alone.
$(O)/.servers: $(O)/.ready
	$(O)/bin/python $(PIP) litserve fastapi
	touch $@
