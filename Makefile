# Where the environment forbids to keep byte code, each of a hundred processes would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SERVING ?= .venv-serving
# Where `make try` installs gqa, without what development needs; where `make install` was here, its environment.
TRY ?= $(if $(wildcard $(VENV)/.installed),$(VENV),.venv-try)
# Builds of torch: with CUDA from PyPI only where there is an NVIDIA GPU, since they take gigabytes.
TORCH_INDEX ?= $(if $(shell nvidia-smi -L 2>/dev/null),https://pypi.org/simple,https://download.pytorch.org/whl/cpu)
LOWEST ?= .venv-lowest
# Python makes byte code of what it imports, at the first import: all of it would take a minute.
PIP_FLAGS := --quiet --disable-pip-version-check --no-compile

.PHONY: try install lint format types docs test test-real test-scale test-serving test-lowest test-installed build check demo benchmark clean

# The first thing to type in a clone: an environment, a conversion, and what both models write.
try: $(TRY)/.installed
	$(TRY)/bin/gqa-convert --kv-heads 2 --method calibrated --overwrite examples/stdlib-mha
	$(TRY)/bin/python examples/try.py examples/stdlib-mha examples/stdlib-mha-gqa2-calibrated
	@echo
	@echo "Go on:  . $(TRY)/bin/activate"
	@echo "        # Convert with the default method, which is slower and better; docs/quickstart.md goes on from there:"
	@echo "        gqa-convert --kv-heads 2 examples/stdlib-mha"
	@echo "        # Or measure both models on text that they were not trained on:"
	@echo "        gqa-eval examples/stdlib-mha examples/stdlib-mha-gqa2-calibrated --data stdlib:heldout --tokens 20000 --recall"

install: $(VENV)/.installed

ifneq ($(TRY),$(VENV))
$(TRY)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "gqa needs Python 3.11 or newer; name one: make try PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(TRY) || \
		{ echo "Python has no venv module; on Debian and Ubuntu: sudo apt install python3-venv"; exit 1; }
	@echo "Installing gqa, torch and transformers into $(TRY): hundreds of MB to download, and a few minutes without output ..."
	@# torch alone, and one retry: where its index cannot be reached, the configured one has a build.
	$(TRY)/bin/pip install $(PIP_FLAGS) -c constraints.txt \
		--no-deps --retries 1 --extra-index-url $(TORCH_INDEX) torch
	$(TRY)/bin/pip install $(PIP_FLAGS) -c constraints.txt .
	@touch $@
endif

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing gqa, torch and what development needs into $(VENV); this takes minutes and prints little"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_FLAGS) -c constraints.txt torch
	$(BIN)/pip install $(PIP_FLAGS) -c constraints.txt -e ".[dev]"
	@touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint Dockerfile

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Type checkers do not follow an editable install's import hook: links show them the packages as they are imported.
types: install
	@mkdir -p typings/gqa
	@for package in core checkpoint models corpus convert uptrain eval study package; do ln -sfn ../../$$package typings/gqa/$$package; done
	$(BIN)/mypy

# No dead link, no page outside the navigation.
docs: install
	$(BIN)/mkdocs build --strict --clean

test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist worksteal --durations 15 -m "not real and not scale"

test-real: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m real

# More than two processes, and models of hundreds of megabytes.
test-scale: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --durations 5 -m scale

# Serving engines in an environment of their own; pytest collects nothing below tests/serving.
test-serving: $(SERVING)/.installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=tests $(SERVING)/bin/python -m serving

$(SERVING)/.installed: pyproject.toml constraints.txt tests/serving/requirements.txt tests/serving/converter.txt
	$(PYTHON) -m venv $(SERVING)
	$(SERVING)/bin/pip install $(PIP_FLAGS) -c constraints.txt torch
	$(SERVING)/bin/pip install $(PIP_FLAGS) -c constraints.txt -r tests/serving/requirements.txt -e .
	$(SERVING)/bin/pip download --quiet --disable-pip-version-check --no-deps --no-build-isolation --require-hashes \
		--no-binary :all: --dest $(SERVING) -r tests/serving/converter.txt
	tar -xzf $(SERVING)/llama_cpp_python-*.tar.gz -C $(SERVING) --strip-components 2 --wildcards \
		"*/vendor/llama.cpp/convert_hf_to_gguf.py" "*/vendor/llama.cpp/conversion" "*/vendor/llama.cpp/gguf-py"
	@touch $@

# The oracles with the lowest versions that pyproject.toml allows.
test-lowest: $(LOWEST)/.installed
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -q -n 2 tests/test_families.py tests/test_custom_code.py \
		tests/test_native.py tests/test_uptrain_resume.py tests/test_losses.py tests/test_tokens.py \
		tests/test_hub.py tests/test_scoring.py tests/test_structure.py

$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/pip install $(PIP_FLAGS) -c constraints-lowest.txt torch
	$(LOWEST)/bin/pip install $(PIP_FLAGS) -c constraints-lowest.txt \
		-e ".[lora]" hypothesis protobuf pytest pytest-xdist sentencepiece
	@touch $@

build: install
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

# The built packages, each installed into a fresh environment.
test-installed: build
	$(PYTHON) tests/installed.py dist

check: lint types docs test test-real test-installed

demo: install
	$(BIN)/python examples/demo.py

benchmark: install
	$(BIN)/python benchmarks/speed.py convert

clean:
	rm -rf build dist site typings .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
