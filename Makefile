# headrace. `make demo` and `make test` do all set-up; each step is skipped where it is up to date.
#
#   make demo      set up, then generate clicks and run a whole day: lake -> features -> train -> score -> PostgreSQL -> report
#                  (make demo DS=2026-01-09 for another day; its results are in ./var)
#   make closed-loop   six days of lists and visitors who click on them, with an experiment that stops its losing arm (docs/outcomes.md)
#   make test      set up what a contributor needs, then lint, the documentation and the quick lane of tests (CONTRIBUTING.md; about a quarter of an hour cold)
#   make test-all  set up everything (RAPIDS 1 GB, CUDA 271 MB, ...), then lint and all tests but the long ones: what CI runs
#   make test-long     by hand: tests marked long, 10 times as many examples of each property test, ten minutes of a server's load, other Pythons
#   make test-pythons  the quick lane's unit tests on the Pythons besides .venv's, each in an environment of its own (build/pythons)
#   make lint      ruff, mypy, import-linter
#   make docs      the documentation as a site with search: build/site (python3 -m http.server -d build/site)
#   make gpu-check every operator and shipped pipeline under the RAPIDS plugin (no GPU needed; fetches its jar, 1 GB)
#   make iceberg   the jar for pipelines whose source is an Iceberg table (47 MB)
#   make clickhouse    ClickHouse in process (chdb), for its tests (51 MB)
#   make s3        what Spark needs for a lake in S3 (9 MB): docs/storage.md
#   make s3-day    a whole day with lake and store in S3 beside the same day on local files; fetches an S3 server (12 MB)
#   make hdfs-day  the same with lake and store in HDFS; make yarn-day: and the tasks and ranks in containers of YARN (81 MB)
#   make hadoop    HDFS and YARN of one machine for tests (81 MB)
#   make rack      (root) three hosts as namespaces of this machine that share nothing but S3, a day over them, a day
#                  from headrace pack's archive alone (RACK=packed), a host that is cut off (RACK=all): docs/measured-clusters.md
#   make native-cuda   the native libraries with CUDA (no GPU needed; fetches compilers, 271 MB, and the plugin's jar)
#   make env PYTHON=python3.13   .venv of another Python, by name or path: docs/stack.md has those that were run
#   make env HOROVOD=gloo   Horovod without NCCL: for ranks on CPUs alone; needs no CUDA compilers
#   make bench     all benchmarks; make bench-day for one: build/bench/*.json
#   make quality   models on real data sets beside published figures: docs/quality.md (PARTS=beauty,adult SEEDS=1,2,3)
#   make month     30 days of generated clicks that move, trained anew every day: docs/month.md (make year: 365 short ones)
#   make month-replay  the same days with rows of older days in their steps: what is forgotten with and without
#   make disk-use  disk use over 60 simulated days, with headrace gc after each and without: docs/measured-operation.md
#   make bench-gpu on a machine with a GPU: floors, the embedding step, whole DLRM steps (bench/gpu/run.py)
#   make sanitize-gpu  on a machine with a GPU: native functions and Triton kernels under compute-sanitizer
#   make bench-peers       TorchRec and FBGEMM beside the environment (build/peers), for make bench-embeddings, bench-dynamic, bench-train
#   make bench-etl-peers   NVTabular, DuckDB and Polars in environments of their own (build/peers), for make bench-etl
#   make doctor    what is installed, what is missing, what to do
#   make airflow   Airflow's own environment (.venv-airflow)
#   make onnx      what `headrace export` needs: ONNX, onnxruntime
#   make serve     what `headrace serve` needs besides: gRPC, httptools, uvloop; Triton's client for its tests
#   make wheel     headrace as a wheel with its conf, jars and native libraries, and a wheel of each of plugins/: build/dist (docs/pack.md)
#   make export-parity     exports of all models beside torch, by format and precision: docs/measured-scores.md
#   make clean     remove build/, the environments and ./var; keep the caches

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.ONESHELL:
MAKEFLAGS += --no-builtin-rules --no-print-directory

DS ?= 2026-01-08
HOME_DIR ?= var
STAMPS := build/stamps
STEP := scripts/step
# The environment, and the stamps of what is installed in it. `make test-pythons` calls make with others.
VENV := .venv
VENV_STAMPS := $(STAMPS)
VENV_PYTHON := $(VENV)/bin/python
HEADRACE := $(VENV)/bin/headrace
# Pythons that have locks. The first one has requirements/*.lock, others have folders there. PYTHON=python3.13, or a path,
# makes the environment anew; without PYTHON it stays of the Python that it is of.
PYTHON_VERSIONS := 3.11 3.12 3.13
ifeq ($(origin PYTHON),command line)
PYTHON_VERSION := $(shell scripts/prerequisites.sh --version '$(PYTHON)')
ifeq ($(PYTHON_VERSION),)
$(error PYTHON=$(PYTHON) cannot be used: see above)
endif
else
PYTHON_VERSION := $(or $(patsubst $(VENV_STAMPS)/python.%,%,$(firstword $(wildcard $(VENV_STAMPS)/python.*))),$(firstword $(PYTHON_VERSIONS)))
PYTHON := python$(PYTHON_VERSION)
endif
LOCKS := requirements/$(addsuffix /,$(filter-out $(firstword $(PYTHON_VERSIONS)),$(PYTHON_VERSION)))
UV := build/tools/bin/uv
UV_VERSION := 0.13.8
# What Horovod is built with: nccl (messages between GPUs, and gloo for CPUs), or gloo alone. What is there stays;
# where nothing is, `make test` takes gloo, since nccl needs the CUDA compilers; so does the demo on a machine without a GPU.
export DEFAULT_FLAVOUR ?= $(if $(filter test setup-test $(if $(wildcard /dev/nvidiactl),,demo),$(MAKECMDGOALS)),gloo,nccl)
HOROVOD ?= $(or $(patsubst $(VENV_STAMPS)/horovod.%,%,$(firstword $(wildcard $(VENV_STAMPS)/horovod.*))),$(DEFAULT_FLAVOUR))
# Who asks for a flavour gets that one or an error; who does not gets gloo where the other cannot be built.
HOROVOD_ELSE := $(if $(filter file,$(origin HOROVOD)),gloo)

.PHONY: demo setup-demo closed-loop test test-all test-long test-long-here test-pythons setup-test setup-test-all downloads-test downloads-test-all lint bench disk-use quality bench-gpu sanitize-gpu bench-etl-peers doctor airflow clean env native native-cuda jars iceberg clickhouse s3 s3proxy s3-day hdfs-day yarn-day hadoop rack rapids onnx export-parity serve wheel gpu-check docs lock format
.DEFAULT_GOAL := help

.PHONY: help
help:
	@sed -n 's/^#  \{0,1\}//p;/^$$/q' Makefile

# --- set-up ---------------------------------------------------------------------------------------------------------

$(STAMPS)/tools: scripts/prerequisites.sh
	@mkdir -p $(@D)
	@$(STEP) "look for Python $(PYTHON_VERSION), a JDK, a C++ compiler, Gradle" scripts/prerequisites.sh "$(PYTHON)"
	@$(STEP) "install uv $(UV_VERSION)" bash -c '"$$(scripts/prerequisites.sh --python "$(PYTHON)")" -m venv build/tools && build/tools/bin/pip install -q --disable-pip-version-check uv==$(UV_VERSION)'
	@touch $@

# Where PYTHONDONTWRITEBYTECODE is set (images, CI) each process would compile what it imports, torch and MLflow among it:
# 1 to 3 s of each stage. So packages are compiled when they are installed.
export UV_COMPILE_BYTECODE := 1

# An environment of another Python is made anew.
$(VENV_STAMPS)/python.$(PYTHON_VERSION): $(STAMPS)/tools
	@mkdir -p $(@D)
	@$(STEP) "make an environment of Python $(PYTHON_VERSION)" bash -c '[ "$$($(VENV_PYTHON) -c "import sys; print(\"%d.%d\" % sys.version_info[:2])" 2>/dev/null)" = $(PYTHON_VERSION) ] || $(UV) venv -q --clear --python "$$(scripts/prerequisites.sh --python "$(PYTHON)")" $(VENV)'
	@rm -f $(VENV_STAMPS)/python.*
	@touch $@

$(VENV_STAMPS)/venv: $(LOCKS)headrace.lock $(VENV_STAMPS)/python.$(PYTHON_VERSION)
	@$(STEP) "install the environment (torch is large: about a minute)" bash -c '$(UV) pip sync -q --require-hashes --python $(VENV_PYTHON) $(LOCKS)headrace.lock'
	@touch $@

# The flavour that was installed in the end leaves the stamp.
$(VENV_STAMPS)/horovod.$(HOROVOD): scripts/install-horovod.sh scripts/build-horovod.sh $(wildcard native/horovod/*.patch) $(VENV_STAMPS)/venv
	@$(STEP) "install Horovod, flavour $(HOROVOD) (built from source the first time)" scripts/install-horovod.sh $(UV) $(VENV) $(VENV_STAMPS) $(STAMPS)/cuda $(CUDA) $(HOROVOD) $(HOROVOD_ELSE)

$(VENV_STAMPS)/package: pyproject.toml setup.py $(VENV_STAMPS)/venv
	@$(STEP) "install headrace itself" bash -c '$(UV) pip install -q --python $(VENV_PYTHON) --no-deps --no-build-isolation -e . && $(VENV_PYTHON) -m compileall -q python'
	@mkdir -p build/src && ln -sfn ../../python build/src/headrace
	@touch $@

# The warehouses of vendors, without their client libraries, HDFS, with its own, and benchmark sets: found by their entry points.
PLUGINS := $(wildcard plugins/headrace-*)
$(VENV_STAMPS)/plugins: $(LOCKS)hdfs.lock $(addsuffix /pyproject.toml,$(PLUGINS)) $(VENV_STAMPS)/package
	@$(STEP) "install plugins/" bash -c '$(UV) pip install -q --require-hashes --no-deps --python $(VENV_PYTHON) -r $(LOCKS)hdfs.lock && $(UV) pip install -q --python $(VENV_PYTHON) --no-deps --no-build-isolation $(addprefix -e ./,$(PLUGINS)) && $(VENV_PYTHON) -m compileall -q $(PLUGINS)'
	@touch $@

# native/: CMake and javac, by Gradle. Where the CUDA compilers were installed the CUDA library stays part of it.
NATIVE := $(shell find native -type f -not -path 'native/horovod/*') build.gradle
CUDA := build/tools/cuda/nvidia/cu13
$(STAMPS)/native: $(NATIVE) $(VENV_STAMPS)/venv
	@$(STEP) "compile native/ (C++, the UDFs' jar)" bash -c 'set -o pipefail; gradle -q --no-daemon native $(if $(wildcard $(CUDA)/lib64),-Pcuda=$(CUDA) -Psanitizers) 2>&1 | { grep -vi "^openjdk" || true; }'
	@touch $@

# The compilers look for libraries in lib64. The link is made last, so that it stands for a finished installation.
$(STAMPS)/cuda: requirements/cuda.lock $(STAMPS)/tools
	@$(STEP) "install the CUDA compilers" bash -c 'rm -rf build/tools/cuda; $(UV) pip install -q --python build/tools/bin/python --target build/tools/cuda --no-deps --require-hashes -r requirements/cuda.lock; ln -s lib $(CUDA)/lib64'
	@touch $@

$(STAMPS)/native-cuda: $(NATIVE) $(VENV_STAMPS)/venv $(STAMPS)/cuda $(STAMPS)/rapids
	@$(STEP) "compile native/ (C++, CUDA for sm_80 and sm_90, the UDFs' jar with its GPU side)" bash -c 'set -o pipefail; gradle -q --no-daemon native -Pcuda=$(CUDA) -Psanitizers 2>&1 | { grep -vi "^openjdk" || true; }'
	@touch $@ $(STAMPS)/native

$(STAMPS)/jars: build.gradle $(STAMPS)/tools
	@$(STEP) "resolve jars (Delta, Avro)" bash -c 'set -o pipefail; gradle -q --no-daemon jars 2>&1 | { grep -vi "^openjdk" || true; }'
	@touch $@

# A JVM maps the archive whose class path its own begins with: one with the jars of S3, and one without.
ARCHIVE_CLASSES = bash -c 'set -o pipefail; $(VENV_PYTHON) scripts/archive_classes.py $(1) 2>&1 | { grep -v "^WARNING: Using incubator\|spark.local.dir will be" || true; }'
$(STAMPS)/classes: scripts/archive_classes.py python/lake/spark/session.py $(STAMPS)/jars $(VENV_STAMPS)/package
	@$(STEP) "archive Spark's classes, so that every stage starts faster" $(call ARCHIVE_CLASSES,build/spark/classes.jsa)
	@touch $@

$(STAMPS)/classes-s3: scripts/archive_classes.py python/lake/spark/session.py $(STAMPS)/jars $(VENV_STAMPS)/package $(STAMPS)/s3
	@$(STEP) "archive Spark's classes with those of S3" $(call ARCHIVE_CLASSES,build/spark/classes-s3.jsa --s3)
	@touch $@

$(STAMPS)/iceberg: build.gradle $(STAMPS)/tools
	@$(STEP) "resolve Iceberg's jar (47 MB the first time)" bash -c 'set -o pipefail; gradle -q --no-daemon iceberg 2>&1 | { grep -vi "^openjdk" || true; }'
	@touch $@

$(STAMPS)/s3: $(shell find native/src/s3 -type f) build.gradle $(STAMPS)/jars $(VENV_STAMPS)/venv
	@$(STEP) "resolve Spark's file system for S3 (9 MB the first time)" bash -c 'set -o pipefail; gradle -q --no-daemon s3 2>&1 | { grep -vi "^openjdk" || true; }'
	@touch $@

$(STAMPS)/s3proxy: build.gradle $(STAMPS)/tools
	@$(STEP) "resolve S3Proxy (12 MB the first time)" bash -c 'set -o pipefail; gradle -q --no-daemon s3proxy 2>&1 | { grep -vi "^openjdk" || true; }'
	@touch $@

$(STAMPS)/hadoop: build.gradle requirements/hadoop.jars $(STAMPS)/tools
	@$(STEP) "resolve the servers of HDFS and YARN (81 MB the first time)" bash -c 'set -o pipefail; gradle -q --no-daemon hadoop 2>&1 | { grep -vi "^openjdk" || true; }'
	@touch $@

$(STAMPS)/rapids: build.gradle $(STAMPS)/tools
	@$(STEP) "resolve the RAPIDS plugin (1 GB the first time)" bash -c 'set -o pipefail; gradle -q --no-daemon rapids 2>&1 | { grep -vi "^openjdk" || true; }'
	@touch $@

# Beside what `venv` installs, in the same environment.
$(VENV_STAMPS)/onnx: $(LOCKS)onnx.lock $(VENV_STAMPS)/venv
	@$(STEP) "install ONNX and onnxruntime (120 MB)" $(UV) pip install -q --require-hashes --no-deps --python $(VENV_PYTHON) -r $(LOCKS)onnx.lock
	@touch $@

$(VENV_STAMPS)/serve: $(LOCKS)serve.lock $(VENV_STAMPS)/onnx
	@$(STEP) "install the server's libraries (60 MB)" $(UV) pip install -q --require-hashes --no-deps --python $(VENV_PYTHON) -r $(LOCKS)serve.lock
	@touch $@

$(VENV_STAMPS)/clickhouse: $(LOCKS)clickhouse.lock $(VENV_STAMPS)/venv
	@$(STEP) "install ClickHouse for its tests (51 MB)" $(UV) pip install -q --require-hashes --no-deps --python $(VENV_PYTHON) -r $(LOCKS)clickhouse.lock
	@touch $@

$(STAMPS)/airflow: requirements/airflow.lock $(STAMPS)/tools
	@$(STEP) "install Airflow's environment" bash -c '[ -x .venv-airflow/bin/python ] || $(UV) venv -q --python "$$(scripts/prerequisites.sh --python)" .venv-airflow; $(UV) pip sync -q --require-hashes --python .venv-airflow/bin/python requirements/airflow.lock; .venv-airflow/bin/python -m compileall -q airflow_dags'
	@touch $@

# The documentation's site, by MkDocs in an environment of its own. It reads headrace's docstrings without importing it.
# Not with -q: MkDocs then counts no warnings, and a broken link passes.
$(STAMPS)/docs-env: requirements/docs.lock $(STAMPS)/tools
	@$(STEP) "install MkDocs' environment" bash -c '[ -x .venv-docs/bin/python ] || $(UV) venv -q --python "$$(scripts/prerequisites.sh --python)" .venv-docs; $(UV) pip sync -q --require-hashes --python .venv-docs/bin/python requirements/docs.lock'
	@touch $@

PAGES := mkdocs.yml scripts/docs_site.py $(shell find docs python examples airflow_dags plugins *.md -name '*.md' -o -name '*.py' -o -name '*.ipynb' -o -path 'docs/*.*' 2>/dev/null)
$(STAMPS)/docs: $(PAGES) $(STAMPS)/docs-env
	@mkdir -p build/src && ln -sfn ../../python build/src/headrace
	@$(STEP) "build the documentation's site: build/site" bash -c 'set -o pipefail; NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict 2>&1 | { grep -v "^INFO" || true; }'
	@touch $@

# peer-env NAME TITLE: requirements/NAME.lock in build/peers/NAME
define peer-env
$(STAMPS)/peers-$(1): requirements/$(1).lock $(STAMPS)/tools
	@$(STEP) "install $(2)'s environment" bash -c '[ -x build/peers/$(1)/bin/python ] || $(UV) venv -q --python "$$$$(scripts/prerequisites.sh --python)" build/peers/$(1); $(UV) pip sync -q --require-hashes --python build/peers/$(1)/bin/python requirements/$(1).lock'
	@touch $$@
endef
$(eval $(call peer-env,nvtabular,NVTabular))
$(eval $(call peer-env,duckdb-polars,DuckDB and Polars))

# A changed lock is installed by whichever target needs the environment first. That removes all that the lock does not
# name, Horovod and this package among it: each such target puts back what had been there.
INSTALLED := $(wildcard $(addprefix $(VENV_STAMPS)/,horovod.$(HOROVOD) package plugins onnx serve clickhouse))
env native native-cuda s3 onnx serve clickhouse lint: $(INSTALLED)

env: $(VENV_STAMPS)/horovod.$(HOROVOD) $(VENV_STAMPS)/package $(VENV_STAMPS)/plugins $(STAMPS)/native $(STAMPS)/jars $(STAMPS)/classes
jars: $(STAMPS)/jars
native: $(STAMPS)/native
native-cuda: $(STAMPS)/native-cuda
iceberg: $(STAMPS)/iceberg
clickhouse: $(VENV_STAMPS)/clickhouse
s3: $(STAMPS)/s3 $(STAMPS)/classes-s3
s3proxy: $(STAMPS)/s3proxy
hadoop: $(STAMPS)/hadoop
rapids: $(STAMPS)/rapids
airflow: $(STAMPS)/airflow
docs: $(STAMPS)/docs
onnx: $(VENV_STAMPS)/onnx
serve: $(VENV_STAMPS)/serve
wheel: env s3
	@$(STEP) "build the wheels: build/dist" scripts/wheel.sh build/dist
export-parity: env onnx
	@$(VENV_PYTHON) -m bench.export_parity

# --- what people run ------------------------------------------------------------------------------------------------

# A recipe that calls make does nothing else: `make -n` runs the whole of it.
setup-demo:
	@$(MAKE) -j4 env
demo: setup-demo
	@$(HEADRACE) generate clicks --home $(HOME_DIR) --until $(DS)
	@$(HEADRACE) run clicks --home $(HOME_DIR) --ds $(DS)

closed-loop: env
	@$(VENV_PYTHON) scripts/closed_loop.py --home build/closed-loop

s3-day: env s3 s3proxy
	@PYTHONPATH=. $(VENV_PYTHON) scripts/store_day.py --on s3

hdfs-day yarn-day: env hadoop
	@PYTHONPATH=. $(VENV_PYTHON) scripts/store_day.py --on hdfs $(if $(filter yarn-day,$@),--yarn)

# RACK="day slow_link ...": scenarios; all of them: RACK=all.
RACK ?= day
rack: env s3 s3proxy
	@$(VENV_PYTHON) -m bench.rack $(RACK)

doctor: env
	@$(HEADRACE) doctor

# mypy reads the packages that headrace's modules import: httptools is one of the server's.
lint: $(VENV_STAMPS)/package $(VENV_STAMPS)/plugins $(VENV_STAMPS)/serve
	@$(STEP) "ruff check" .venv/bin/ruff check -q .
	@$(STEP) "ruff format" .venv/bin/ruff format -q --check .
	@$(STEP) "words" .venv/bin/python scripts/check_words.py
	@$(STEP) "mypy --strict" .venv/bin/mypy -p headrace $(addprefix -p ,$(subst -,_,$(notdir $(PLUGINS))))
	@$(STEP) "import-linter" .venv/bin/lint-imports

gpu-check: env rapids
	@$(STEP) "what leaves the GPU" $(HEADRACE) plan --gpu

# What the tests of a lane read (tests/lanes.py: which tests these are).
TEST_READS := $(addprefix $(VENV_STAMPS)/,horovod.$(HOROVOD) package plugins serve) $(addprefix $(STAMPS)/,jars classes airflow)
QUICK_READS := $(TEST_READS) $(STAMPS)/native
ALL_READS := $(TEST_READS) $(VENV_STAMPS)/clickhouse $(addprefix $(STAMPS)/,native-cuda rapids iceberg s3proxy hadoop)

# First what loads, then what computes. Horovod is compiled by both cores but for its configuration, its links and its
# last file; the class archive and mypy take one core each. Gradle is run by one process at a time.
downloads-test: $(STAMPS)/tools
	@for target in jars airflow; do $(MAKE) $$target; done
downloads-test-all: $(STAMPS)/tools
	@for target in rapids jars iceberg s3proxy hadoop airflow; do $(MAKE) $$target; done
setup-test:
	@$(MAKE) -j3 $(VENV_STAMPS)/venv downloads-test
	@$(MAKE) -j4 $(QUICK_READS) lint docs
setup-test-all:
	@$(MAKE) -j3 $(VENV_STAMPS)/venv $(STAMPS)/cuda downloads-test-all
	@$(MAKE) -j4 $(ALL_READS) lint docs
	@$(MAKE) $(STAMPS)/classes-s3

# More processes than cores: many tests wait, for JVMs, for ranks and for deadlines. A process may take 3 GB.
TEST_PROCESSES ?= 4
PYTEST := $(VENV_PYTHON) -m pytest -n $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder --durations 25
test: setup-test
	@HEADRACE_TEST_LANE=quick $(PYTEST) $(PYTEST_ARGS)
test-all: setup-test-all
	@HEADRACE_TEST_LANE=all $(PYTEST) $(PYTEST_ARGS)
# A test may take hours: ten times its examples. A run that was stopped goes on at the same commit.
test-long: test-long-here test-pythons
test-long-here: setup-test-all
	@HEADRACE_TEST_LANE=long HEADRACE_TEST_PASSED=build/test-long/$$(git rev-parse --short=12 HEAD) $(PYTEST) --timeout 36000 $(PYTEST_ARGS)
	@$(VENV_PYTHON) -m bench.bench_serve --soak --minutes 10

# PYTHONS="3.12": those alone. Each environment has a Horovod of its own; native libraries and jars are those of .venv.
PYTHONS ?= $(filter-out $(PYTHON_VERSION),$(PYTHON_VERSIONS))
test-pythons: $(addprefix test-python-,$(PYTHONS))
setup-python-%: $(QUICK_READS)
	@$(MAKE) VENV=build/pythons/$* VENV_STAMPS=$(STAMPS)/$* PYTHON=python$* HOROVOD=gloo $(addprefix $(STAMPS)/$*/,horovod.gloo package plugins serve)
test-python-%: setup-python-%
	@HEADRACE_TEST_LANE=quick build/pythons/$*/bin/python -m pytest -n $(TEST_PROCESSES) --dist loadscope --no-loadscope-reorder $(PYTEST_ARGS) tests/unit

$(STAMPS)/bench-peers: requirements/fbgemm.txt requirements/torchrec.txt $(VENV_STAMPS)/package
	@$(STEP) "install FBGEMM for the CPU, and TorchRec" bash -c 'for peer in fbgemm torchrec; do rm -rf build/peers/$$peer; $(UV) pip install -q --python $(VENV_PYTHON) --target build/peers/$$peer --no-deps -r requirements/$$peer.txt; done'
	@touch $@
.PHONY: bench-peers
bench-peers: $(STAMPS)/bench-peers

BENCHES := $(patsubst bench/bench_%.py,%,$(wildcard bench/bench_*.py))
bench: $(addprefix bench-,$(BENCHES))
MONTH_ARGS ?=
.PHONY: month month-replay year
month: env
	@$(VENV_PYTHON) -m bench.retrain --days 30 $(MONTH_ARGS)
month-replay: env
	@$(VENV_PYTHON) -m bench.retrain.replay $(MONTH_ARGS)
year: env
	@$(VENV_PYTHON) -m bench.retrain --days 365 --home build/year --set generate.rows_per_day=30000 $(MONTH_ARGS)
# PARTS=beauty,adult: those alone; goes on where it was stopped (bench/quality/__init__.py).
PARTS ?=
SEEDS ?= 1,2,3
quality: env
	@$(VENV_PYTHON) -m bench.quality --parts "$(PARTS)" --seeds "$(SEEDS)" $(QUALITY_ARGS)
bench-etl-peers: $(STAMPS)/peers-nvtabular $(STAMPS)/peers-duckdb-polars
disk-use: env
	@$(VENV_PYTHON) -m bench.simulated_days
bench-gpu: env
	@$(VENV_PYTHON) bench/gpu/run.py
sanitize-gpu: native-cuda env
	@command -v compute-sanitizer >/dev/null || { echo "sanitize-gpu: no compute-sanitizer here: it comes with the CUDA toolkit (/usr/local/cuda/bin)" >&2; exit 2; }
	@PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 $(VENV_PYTHON) -m pytest -q -x -n0 --noconftest tests/native/test_columns.py -k gpu
	@PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 9 $(VENV_PYTHON) -m pytest -q -x -n0 --confcutdir=tests/gpu tests/gpu/test_kernels.py tests/gpu/test_kernels.py
bench-serve: serve
bench-%: env
	@mkdir -p build/bench
	@$(VENV_PYTHON) -m bench.bench_$*

# --- for developers -------------------------------------------------------------------------------------------------

format: $(VENV_STAMPS)/venv
	@.venv/bin/ruff check -q --fix . && .venv/bin/ruff format -q .

# Compile the locks again after a change of requirements/*.in. Hashes, no index address. Those that share the environment
# with headrace.lock obey it; serve.lock obeys onnx.lock, too.
COMPILE := $(UV) pip compile -q --no-header --generate-hashes
lock: $(STAMPS)/tools
	@for version in $(PYTHON_VERSIONS); do
	  folder=requirements; [ $$version = $(firstword $(PYTHON_VERSIONS)) ] || folder=requirements/$$version
	  pinned=build/tmp/$$version.constraints; mkdir -p $$folder build/tmp; : >$$pinned
	  for name in headrace onnx serve hdfs; do
	    $(COMPILE) --python-version $$version -c $$pinned requirements/$$name.in -o $$folder/$$name.lock
	    sed 's/ *\\$$//; /--hash/d; /^ /d' $$folder/$$name.lock >>$$pinned
	  done
	  $(COMPILE) --python-version $$version --no-deps requirements/clickhouse.in -o $$folder/clickhouse.lock
	done
	@$(COMPILE) --python-version 3.11 requirements/cuda.in -o requirements/cuda.lock
	@$(COMPILE) --python-version 3.11 --override requirements/airflow.overrides requirements/airflow.in -o requirements/airflow.lock
	@$(COMPILE) --python-version 3.11 --override requirements/nvtabular.overrides requirements/nvtabular.in -o requirements/nvtabular.lock
	@$(COMPILE) --python-version 3.11 requirements/duckdb-polars.in -o requirements/duckdb-polars.lock
	@$(COMPILE) --python-version 3.11 requirements/docs.in -o requirements/docs.lock

clean:
	@rm -rf build .venv .venv-airflow .venv-docs var .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .gradle *.egg-info python/*.egg-info
