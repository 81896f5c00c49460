# The commands people type; each calls one script. See README.md.
PYTHON ?= python3
BASE ?= 0.33.0
ARCH ?= $(shell uname -m)
TOOLS := .venv/bin/python
RUN = $(TOOLS) scripts/$(1).py --base $(BASE)

.PHONY: wheel source export check verify lint
.DELETE_ON_ERROR:

wheel: source  ## dist/vllm-*.whl for ARCH (x86_64, aarch64)
	@$(call RUN,build_wheel) --arch $(ARCH)

source: .venv/ready  ## vllm/: the release plus one commit a patch
	@$(call RUN,source) $(if $(VLLM_GIT),--git $(VLLM_GIT))

export: .venv/ready  ## vllm/'s commits back to patch files
	@$(call RUN,export)

check: source  ## each patch: applies, lints, compiles, its tests pass
	@$(call RUN,check)

verify: source  ## WHEEL=...: official wheel + series, nothing else
	@$(call RUN,verify) $(WHEEL)

lint: .venv/ready
	@.venv/bin/pre-commit run --all-files

.venv/ready: requirements/uv.txt requirements/tools.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	  sys.exit(v < (3, 11) and f"error: Python 3.11 or newer is needed, \
	  found {v[0]}.{v[1]}: make PYTHON=python3.x ...")'
	@$(PYTHON) -m venv --clear .venv
	@.venv/bin/python -m pip install -q --disable-pip-version-check \
	  --require-hashes --no-deps -r requirements/uv.txt
	@.venv/bin/uv pip install -q -p .venv --require-hashes --no-deps \
	  -r requirements/tools.txt
	@touch $@
