# make demo   set up .venv and run pipelines/quickstart.yaml
# make test   set up .venv, run the checks and tests of CI, and print how long each part took
# make fuzz   set up .venv and try 5000 changed inputs of each kind; FUZZ_EXAMPLES=… for more
# make attack   set up .venv and try what attackers tried: files, requests, kills, a faulty store … (an hour)
# make docs   set up .venv and build the site of docs/ in build/site
# make reference   write docs/reference/ anew, after a setting or a command changed
# make test-lowest   run the quick tests with the lowest versions that pyproject.toml allows (but of torch)
# make test-newest   run the tests with the newest versions that it allows, torch's too (NEWEST=python3.14 for another Python)
# make wheel   build dist/compress_pipeline-*.whl, which is installed without this clone
# make lock   write requirements.lock: the installed versions, with hashes, of all but torch
# make mutation   count the mutants of the mathematics that the tests kill (MUTANTS=compress.core.gate* for some)
PYTHON ?= python3
BIN := .venv/bin
# Of what pyproject.toml allows, the release that CI has as a CPU build: pip would bring the newest, with CUDA.
# A CPU build of it: make demo TORCH='torch --index-url …', with the address that pytorch.org gives.
TORCH ?= torch==2.13.0
NEWEST ?= $(BIN)/python
UV = $(shell grep -oE 'uv>=[^"]*' pyproject.toml)
# Two more than the cores that CI has: many tests wait for processes, servers and deadlines. The order
# is that of tests/conftest.py: long tests first.
WORKERS ?= -n 4 --dist loadgroup --no-loadscope-reorder
CHILDREN ?= 2
TIMES := .venv/times
export PIP_DISABLE_PIP_VERSION_CHECK = 1

# make soak   run the tests that take long or want a quiet machine, one after the other
.PHONY: demo test tests prepared test-lowest test-newest wheel soak fuzz attack lint docs lock mutation reference clean

demo: .venv/demo
	$(BIN)/compress run pipelines/quickstart.yaml

# Lint uses one core; beside it the other has time for the docs and for what the tests need then.
# --output-sync keeps their output apart.
test: .venv/dev
	@rm -f $(TIMES)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target timed-lint timed-docs timed-prepared
	@$(MAKE) --no-print-directory timed-tests
	@cat $(TIMES)

timed-%:
	@begin=$$(date +%s); $(MAKE) --no-print-directory $* || exit; \
	echo "$*: $$(($$(date +%s) - begin)) s" | tee -a $(TIMES)

# Packages compiled once, as pip does, or the tests would take warnings of others' syntax for errors, and each
# process that they start would compile what it imports where PYTHONDONTWRITEBYTECODE is set; what no test
# imports, or few, is a third. Then what all workers read, the tests' modules with rewritten assertions.
UNUSED := (?x)/(tests|benchmarks|bleach|distlib|jedi|lexers|mypyc?|numpy/distutils|parso|pip|prompt_toolkit \
	|pydevd_attach_to_process|pymdownx|setuptools|table_grapheme_overrides|testing/_internal|tornado/test \
	|torch/_vendor|virtualenv|moto/(?!core|s3|iam|sts|events|cloudwatch|moto_|utilities)\w+ \
	|onnxruntime/(quantization|tools|transformers)|ray/(air|data|llm|rllib|serve|train|tune) \
	|sklearn/(cluster|ensemble|linear_model)|sympy/(parsing|physics|stats|vector)|torchao/(_models|prototype) \
	|(huggingface_hub|transformers)/(cli|exporters|inference|models))/
prepared: .venv/dev .venv/tensorrt-rtx .venv/triton
	$(BIN)/python -m compileall -qq -j 2 -x '$(UNUSED)' .venv/lib || true
	$(BIN)/python -m tests.rewritten || true

# Quick and slow tests in one run: the workers import and collect once. The commands that tests start
# would compile what they import each time where PYTHONDONTWRITEBYTECODE is set.
tests: .venv/dev .venv/tensorrt-rtx .venv/triton
	$(BIN)/python -m compileall -q cli.py compress export pipelines serve
	$(BIN)/pytest -q $(WORKERS) -m 'not soak' --durations 50

# But of torch and torchao, whose releases belong together: the lowest torch has no CPU build at the
# default index. Compiled, as pip does, or the tests would take warnings of others' syntax for errors.
test-lowest: .venv/lock
	$(BIN)/pip freeze -q | grep -E '^torch(ao)?==' > .venv/torch.txt
	$(BIN)/uv venv -q --clear --seed --python $(BIN)/python .venv/lowest
	$(BIN)/uv pip install -q --python .venv/lowest/bin/python --resolution lowest-direct --compile-bytecode \
		--constraint .venv/torch.txt -e '.[dev]'
	.venv/lowest/bin/pytest -q $(WORKERS)

# A CUDA build of torch, of several GB, which runs on a CPU, too. Last: what is newer than pyproject.toml allows.
test-newest: .venv/lock
	$(BIN)/uv venv -q --clear --seed --python $(NEWEST) .venv/newest
	$(BIN)/uv pip install -q --python .venv/newest/bin/python --upgrade --compile-bytecode -e '.[dev]'
	.venv/newest/bin/compress doctor | head -n 1
	.venv/newest/bin/pytest -q $(WORKERS) -m 'not soak'
	$(BIN)/uv pip list -q --outdated --python .venv/newest/bin/python

wheel: .venv/bin/pip pyproject.toml
	$(BIN)/pip wheel -q --no-deps --wheel-dir dist .

soak: .venv/dev .venv/tensorrt-rtx .venv/triton
	$(BIN)/pytest -q -m soak

# Hypothesis draws new examples each time; CI tries the same 60 in `make test`.
fuzz: .venv/dev
	HYPOTHESIS_PROFILE=long $(BIN)/pytest -q --timeout 0 tests/fuzz

attack: .venv/dev
	$(BIN)/python -m benchmarks.attack

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Otherwise mkdocs-material tells at length of its own end in May 2027, and of its successor.
# With --quiet, --strict would count no warnings.
docs: .venv/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

reference: .venv/dev
	$(BIN)/python docs/generator/reference.py

# torch is left out, as its builds have other hashes at other indexes. Where uv does not find the build that is
# installed (a CPU build's index), name its index in UV_EXTRA_INDEX_URL, or a folder in UV_FIND_LINKS.
lock: .venv/lock
	$(BIN)/pip freeze -q --exclude-editable > .venv/versions.txt
	$(BIN)/uv pip compile -q pyproject.toml --extra dev --constraint .venv/versions.txt --python $(BIN)/python \
		--generate-hashes --no-annotate --no-emit-package torch --output-file requirements.lock \
		--custom-compile-command 'make lock (all but torch, see CONTRIBUTING.md)'

# Forked after torch is imported, so one thread each; results are kept in mutants/, and a second run
# looks at what changed.
mutation: .venv/mutation
	OMP_NUM_THREADS=1 $(BIN)/mutmut run --max-children $(CHILDREN) $(MUTANTS)
	$(BIN)/python tests/mutation/score.py

.venv/bin/pip:
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/pip pyproject.toml
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q -e '.[serve,server,examples]'
	touch $@

# pip brings torch, as it reads where to find its builds; uv the rest, which takes less time. Where uv does not
# reach the index, as it does not read pip's configuration, pip brings all.
.venv/dev: .venv/bin/pip pyproject.toml
	$(BIN)/pip install -q --no-compile $(TORCH)
	$(BIN)/pip install -q '$(UV)'
	$(BIN)/uv pip install -q --python $(BIN)/python -e '.[dev]' || $(BIN)/pip install -q -e '.[dev]'
	# Without torchvision, of which pip would bring the CUDA build.
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps 'timm>=1.0.20,<2' \
		|| $(BIN)/pip install -q --no-deps 'timm>=1.0.20,<2'
	touch $@ .venv/demo

# For Linux on x86-64 alone, as the next.
.venv/tensorrt-rtx: .venv/dev
	$(BIN)/uv pip install -q --python $(BIN)/python -r pyproject.toml --extra tensorrt-rtx \
		|| $(BIN)/pip install -q -e '.[tensorrt-rtx]' \
		|| echo "no TensorRT for RTX for this machine: its tests are skipped"
	touch $@

# A Triton server for tests/serve/test_triton.py. In a folder: installed, it would bring numpy 1.
.venv/triton: | .venv/dev
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --target $@ nvidia-pytriton==0.7.0 \
		|| { rm -rf $@; $(BIN)/pip install -q --no-deps --target $@ nvidia-pytriton==0.7.0; } \
		|| echo "no Triton for this machine: its tests are skipped"

.venv/lock: .venv/dev
	$(BIN)/pip install -q -e '.[lock]'
	touch $@ .venv/dev .venv/demo

.venv/mutation: .venv/dev
	$(BIN)/pip install -q -e '.[mutation]'
	touch $@ .venv/dev .venv/demo

clean:
	rm -rf .venv runs build dist mutants
