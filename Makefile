# The commands people type; each calls one script. `make help` lists them.
PYTHON ?= python3
BASE ?= 0.33.0
ARCH ?= $(shell uname -m)
WHEEL ?= $(wildcard dist/vllm-$(BASE)+*.whl)
ENV := .venv-vllm-$(BASE)
DEVICE_ENV := $(if $(TORCH),.venv-torch-$(TORCH),$(ENV))
RUN = .venv/bin/python -m $(1) --base $(BASE)
# What ships: all patches, a set, or those asked for.
SHIP = $(call RUN,$(1)) $(if $(PATCHES),--topics "$(PATCHES)") $(if $(SET),--set "$(SET)")

.PHONY: wheel overlay image verify plan kv-table bundle help source export check check-quick \
  alone api size topics-page lint vgpu envelope ray test test-all test-long topics sets device \
  torch-tests figures tables findings pr drift rebase gpu calibrate results-page slice bench \
  bench-load bench-start bench-extensible bench-start-time bench-stock bench-rank-fails \
  bench-first-start bench-starts bench-caller bench-suggestion bench-fragmentation \
  bench-safe bench-advice bench-step bench-sleep bench-plan bench-formats bench-peers

# Checked before anything is fetched or built.
needs = $(if $(filter $(1),$(MAKECMDGOALS)),$(if $($(2))$($(3)),,$(error make $(1): $(4) is needed)))
$(call needs,slice,HAMI,,HAMI=<your slicing library> (docs/on-a-gpu.md))
$(call needs,torch-tests,TESTS,,TESTS=<pytorch/test> (vgpu/README.md))
$(call needs,rebase,TO,,TO=<vLLM release> (docs/upstream.md))
$(call needs,drift,TO,,TO=<vLLM release> (docs/upstream.md))
$(call needs,pr,PATCH,FIRST,PATCH=<patch> or FIRST=<number> (docs/upstream.md))
WITH_SET := wheel overlay image verify plan envelope bench-start
# What those need may be made with them.
WITHOUT_SET := $(filter-out $(WITH_SET) $(if $(filter $(WITH_SET),$(MAKECMDGOALS)),source vgpu), \
  $(MAKECMDGOALS))
$(if $(SET)$(PATCHES),$(if $(WITHOUT_SET),$(error make $(WITHOUT_SET): it takes the whole \
  series. SET= and PATCHES= are for $(WITH_SET))))
SETS := all shared sleep core
one_of = $(if $(filter-out $(3),$(2)),$(error $(1)=$(2): each is one of $(3)))
$(call one_of,SET,$(SET),$(SETS))
$(call one_of,ARCH,$(ARCH),x86_64 aarch64)
$(if $(filter command,$(origin PATCH)),$(if $(filter pr,$(MAKECMDGOALS)),,$(error PATCH= is for \
  make pr. PATCHES= chooses)))
$(if $(HAMI),$(if $(wildcard $(HAMI)),,$(error HAMI=$(HAMI): there is no such file)))

# Bytecode of vLLM and torch is kept: compiling it takes longer than a start.
unexport PYTHONDONTWRITEBYTECODE

##@ Use (the first five, envelope and bench-start take SET=name or PATCHES="a b"; all take BASE=release)

wheel: source  ## dist/vllm-*.whl for ARCH (x86_64, aarch64)
	@$(call SHIP,scripts.build_wheel) --arch $(ARCH)

overlay: wheel  ## dist/*-overlay-ARCH.pyz: installs the changed files alone
	@$(call SHIP,scripts.overlay) --arch $(ARCH)

image: overlay  ## IMAGE= on the official image, or the tag or digest given
	@$(call SHIP,scripts.image) $(if $(IMAGE),--image $(IMAGE)) $(if $(TAG),--tag $(TAG)) \
	  $(if $(BUILDER),--builder "$(BUILDER)") $(if $(OTHER_BUILD),--other-build)

verify: source  ## WHEEL=...: the official wheel and the series, nothing else
	@$(call SHIP,scripts.verify) $(WHEEL)

plan: .venv/ready  ## memory of a start on a virtual GPU: MODEL=, GPU=, FLAGS=, RELEASE=official, SET=, SWEEP=, WARM=1, REPORT=, JSON=, SVG=
	@$(call SHIP,bench.plan) $(if $(MODEL),--model "$(MODEL)") $(if $(GPU),--gpu "$(GPU)") \
	  $(if $(FLAGS),--flags="$$FLAGS") $(if $(RELEASE),--release $(RELEASE)) \
	  $(if $(SWEEP),--sweep "$(SWEEP)") $(if $(WARM),--warm) \
	  $(if $(REPORT),--report "$(REPORT)") $(if $(JSON),--json "$(JSON)") \
	  $(if $(SVG),--svg "$(SVG)")

kv-table: vgpu  ## KV cache bytes of a token, by model: CONFIGS="folders" ONLY=pattern PLAN=pattern
	@$(call RUN,bench.kv_table) $(if $(CONFIGS),--configs $(CONFIGS)) \
	  $(if $(ONLY),--only "$(ONLY)") $(if $(PLAN),--plan "$(PLAN)")
	@$(call RUN,bench.figures)

bundle: .venv/ready  ## both vLLMs in a file, for a GPU machine without a network; TORCH=1: its PyTorch
	@$(if $(TORCH),,$(MAKE) -s wheel ARCH=x86_64)
	@$(call RUN,scripts.bundle) $(if $(SM),--architecture $(SM)) \
	  $(if $(PYTHON_VERSION),--python-version $(PYTHON_VERSION)) $(if $(TORCH),--torch)

help:  ## this list
	@awk -F ':.*?## ' '/^##@ / {print "\n" substr($$0, 5) ":"} \
	  /^[a-z-]+:.*## / {printf "  %-18s %s\n", $$1, $$2}' Makefile

##@ Change

source: .venv/ready  ## vllm/: the release (or VLLM_GIT=clone) and a commit per patch
	@$(call RUN,scripts.source) $(if $(VLLM_GIT),--git "$(VLLM_GIT)")

export: .venv/ready  ## vllm/'s commits back to patch files, and the pages' tables
	@$(call RUN,scripts.export)

check: source vgpu  ## each patch applies, lints, compiles; its tests need it
	@$(call RUN,scripts.api)
	@$(call RUN,scripts.check)

check-quick: source vgpu  ## the same, but its tests run with the whole series only
	@$(call RUN,scripts.api)
	@$(call RUN,scripts.check) --first-failure

alone: source  ## each patch on the release with just those that it needs: applies, lints
	@$(call RUN,scripts.check) --alone --no-tests

api: source  ## BASE=: names of the release that are gone or different, each with its reason
	@$(call RUN,scripts.api)

size: .venv/ready  ## patches and lines of the series, and of its core
	@$(call RUN,scripts.size)

topics-page: .venv/ready  ## the tables of README.md and patches/README.md, from topics.toml
	@$(call RUN,scripts.topics_page)

lint: .venv/ready  ## linters and types, also of files that git does not know yet
	@git ls-files -z --cached --others --exclude-standard | \
	  xargs -0 .venv/bin/pre-commit run --files

vgpu: $(ENV)/ready  ## the virtual CUDA device for the torch of this release
	@$(ENV)/bin/python -m vgpu build

envelope: wheel  ## the patched vLLM unpacked, for tests and benches
	@$(call SHIP,scripts.unpack)

ray: build/ray/ready  ## Ray, for the tests of its workers

test: vgpu envelope overlay  ## the main tests; under 15 minutes on two cores
	@$(call RUN,scripts.run_tests) tools vgpu

test-all: vgpu envelope overlay ray check-quick  ## all tests; about 30 minutes on two cores
	@$(call RUN,scripts.run_tests) tools gpu vgpu-all

test-long: vgpu envelope ray build/libraries/ready  ## tests that take too long for every run
	@$(call RUN,scripts.run_tests) vgpu-long

topics: vgpu envelope  ## BASE=: its wheel, and each patch once
	@$(call RUN,scripts.verify) $(WHEEL)
	@$(call RUN,scripts.run_tests) topics

sets: source $(ENV)/ready vgpu  ## BASE=: the cheapest symptom of each set, stock and with the set alone
	@$(call RUN,scripts.run_tests) sets

device: $(if $(TORCH),.venv-torch-$(TORCH)/ready,vgpu)  ## the device's own suite; TORCH=2.15.0: with that PyTorch
	@$(call RUN,scripts.run_tests) device@$(if $(TORCH),torch-$(TORCH),$(BASE))

torch-tests: build/torch-tests/ready  ## TESTS=pytorch/test: PyTorch's own tests of memory; ONLY=, TORCH=
	@$(DEVICE_ENV)/bin/python -m scripts.torch_suite \
	  --tests "$(TESTS)" \
	  $(if $(ONLY),--only "$(ONLY)") $(if $(OTHER_VERSION),--other-version)

figures: .venv/ready  ## fills in the figures of the pages, from docs/data and results/
	@$(call RUN,bench.figures)

tables: .venv/ready  ## how old the tables of the pages are
	@$(call RUN,scripts.tables)

findings: .venv/ready  ## surprises of other libraries: each script in findings/
	@for script in $(filter-out findings/common.sh,$(wildcard findings/*.sh)); do \
	  echo "== $$script"; PATH="$$PWD/.venv/bin:$$PATH" $$script || exit 1; done

pr: .venv/ready  ## PATCH= or FIRST=15: branch and text of a pull request; VLLM_GIT=clone, else the release
	@$(call RUN,scripts.source)
	@$(call RUN,scripts.pr) $(if $(FIRST),--first $(FIRST),--topic "$(PATCH)") \
	  $(if $(VLLM_GIT),--git "$(VLLM_GIT)") \
	  $(if $(ONTO),--onto "$(ONTO)") $(if $(BRANCH),--branch "$(BRANCH)") \
	  $(if $(SIGNOFF),--signoff) $(if $(VALIDATION),--validation "$(VALIDATION)") \
	  $(if $(NO_HOOKS),--no-hooks)

drift: source  ## TO=: conflicts of the whole series with another release
	@$(call RUN,scripts.drift) --to $(TO)

rebase: source  ## TO=: the series for another release; CHECK=1 is make drift
	@$(call RUN,scripts.rebase) --to $(TO) $(if $(CHECK),--check)

##@ Measure

gpu: vgpu envelope  ## the suite on the GPU of this machine; ONLY=pattern
	@$(call RUN,gpu.suite) $(if $(ONLY),--only "$(ONLY)")
	@$(call RUN,gpu.results_page)

calibrate: vgpu envelope  ## measure the GPU of this machine for vgpu/
	@$(call RUN,gpu.calibrate)
	@$(call RUN,gpu.results_page)

results-page: .venv/ready  ## docs/data/gpu.md from results/
	@$(call RUN,gpu.results_page)

slice: vgpu envelope  ## HAMI=libvgpu.so: limits below your slicing library; ONLY=text SIZE=4GiB
	@$(call RUN,bench.slice) --library "$(HAMI)" \
	  $(if $(ONLY),--only "$(ONLY)") $(if $(SIZE),--size "$(SIZE)")

bench: .venv/ready  ## time and memory of make wheel
	@$(call RUN,bench.wheel)

bench-load: vgpu envelope  ## peak and time of loads in the sleep-mode pool
	@$(call RUN,bench.load)

bench-start: vgpu envelope  ## peak of a start by its budget, also of a SET=
	@$(call SHIP,bench.start)

bench-extensible: vgpu envelope  ## --enable-extensible-kv-cache, the estimate and stock: KV cache, time
	@$(call RUN,bench.extensible)

bench-start-time: vgpu envelope  ## CPU time of a start, patched and stock in pairs; PAIRS=20
	@$(call RUN,bench.start_time) $(if $(PAIRS),--pairs $(PAIRS))

bench-stock: vgpu envelope  ## which starts succeed, with which KV cache; ONLY=pattern, MORE=1: other models
	@$(call RUN,bench.stock_comparison) $(if $(ONLY),--only "$(ONLY)") $(if $(MORE),--more)

bench-rank-fails: vgpu envelope ray  ## seconds until all have ended after one rank failed
	@$(call RUN,bench.rank_fails)

bench-first-start: vgpu envelope  ## the first start and the second; ONLY=pattern
	@$(call RUN,bench.first_start) $(if $(ONLY),--only "$(ONLY)")

bench-starts: vgpu envelope  ## starts drawn at random, beside the release; SEED=1 N=10
	@$(call RUN,bench.random_starts) $(if $(SEED),--seed $(SEED)) $(if $(N),--count $(N))

bench-caller: vgpu envelope  ## random programs of a caller, beside the release; SEED=1 N=8 STEPS=1250
	@$(call RUN,bench.caller) $(if $(SEED),--seed $(SEED)) $(if $(N),--count $(N)) \
	  $(if $(STEPS),--steps $(STEPS))

bench-suggestion: vgpu envelope  ## starts again with each suggested KV cache
	@$(call RUN,bench.suggestion)

bench-fragmentation: vgpu envelope  ## random loads in exactly the budget: OOM, and the cost of serving
	@$(call RUN,bench.fragmentation)

bench-safe: vgpu envelope  ## KV tokens beside stock lowered by hand, at equal safety; ONLY=pattern
	@$(call RUN,bench.safe) $(if $(ONLY),--only "$(ONLY)")

bench-advice: vgpu envelope  ## starts that are refused at random, with what their errors advise; SEED=1 N=10
	@$(call RUN,bench.advice) $(if $(SEED),--seed $(SEED)) $(if $(N),--count $(N))

bench-step: vgpu envelope  ## CPU time of a step that decodes, stock and patched
	@$(call RUN,bench.step)

bench-sleep: vgpu envelope  ## cycles of sleep and wake-up, stock and patched: CPU time, calls; PAIRS=5 GIB=2
	@$(call RUN,bench.sleep) $(if $(PAIRS),--pairs $(PAIRS)) $(if $(GIB),--gib $(GIB))

bench-plan: .venv/ready  ## replays published runs on real cards; ONLY=pattern AGAIN=1
	@$(call RUN,bench.published_runs) $(if $(ONLY),--only "$(ONLY)") $(if $(AGAIN),--again) \
	  --page docs/plan-against-real-cards.md
	@$(call RUN,bench.figures)

bench-formats: vgpu  ## weights, and the peak while they load, by format of quantization
	@$(call RUN,bench.formats)

bench-peers: .venv/ready  ## other planners on the published runs, from their packages
	@$(call RUN,bench.compare_peers)

.venv/ready: requirements/uv.txt requirements/tools.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and \
	  f"error: Python 3.11 or newer is needed, {v[0]}.{v[1]} was found: \
	  make PYTHON=python3.x ...")'
	@$(PYTHON) -m venv --clear .venv
	@.venv/bin/python -m pip install -q --disable-pip-version-check \
	  --require-hashes --no-deps -r requirements/uv.txt
	@.venv/bin/uv pip install -q -p .venv --require-hashes --no-deps \
	  -r requirements/tools.txt
	@touch $@

.venv-%/ready: requirements/%.txt | .venv/ready
	@.venv/bin/uv venv -q --clear -p $(PYTHON) .venv-$*
	@.venv/bin/uv pip install -q -p .venv-$* --require-hashes --no-deps -r $<
	@touch $@

# In a folder of its own: most tests are to see a vLLM without it.
build/ray/ready: requirements/ray.txt | $(ENV)/ready
	@rm -rf build/ray
	@.venv/bin/uv pip install -q -p $(ENV) --target build/ray --require-hashes --no-deps -r $<
	@touch $@

LIBRARIES = .venv/bin/uv pip install -q -p $(ENV) --target build/libraries --require-hashes --no-deps
build/libraries/ready: requirements/libraries.txt requirements/libraries-3.12.txt | $(ENV)/ready
	@rm -rf build/libraries
	@$(LIBRARIES) -r requirements/libraries.txt
	@$(LIBRARIES) --python-version 3.12 -r requirements/libraries-3.12.txt
	@touch $@

build/torch-tests/ready: requirements/torch-tests.txt | $(DEVICE_ENV)/ready
	@rm -rf build/torch-tests
	@.venv/bin/uv pip install -q -p $(DEVICE_ENV) --target build/torch-tests \
	  --require-hashes --no-deps -r $<
	@touch $@
