# kerf: `make help` is the index.

KUBE  ?= 1.36.3
GATES ?= dra
TEST  ?=
DRIVER_ROOT  ?= /
TARGETS      ?= $(notdir $(wildcard fuzz/corpus/*))
SECONDS_EACH ?= 60
PROFILE      ?= debug

CACHE     := $(or $(KERF_CACHE),$(HOME)/.cache/kerf)
TARGET    := $(abspath $(or $(CARGO_TARGET_DIR),target))
CLUSTER   := $(TARGET)/kerf-cluster
DENY      := $(CACHE)/cargo-deny/0.20.2
HELM      := $(CACHE)/helm/$(shell sed -n 's/^const helmVersion = "\(.*\)"/\1/p' e2e/cluster/build.go)/helm
CYCLONEDX := $(CACHE)/cargo-cyclonedx/$(shell sed -n 's/^ARG CYCLONEDX=//p' deploy/Containerfile)
BASE      := $(CACHE)/base-image
HOOK      := $(TARGET)/hook/kerf-cdi-hook
IMAGES    := $(addprefix $(TARGET)/images/,kubelet-plugin.tar controller.tar simulator.tar)
AGAIN     := $(TARGET)/images-again
FUZZ      := $(TARGET)/fuzz
DEMO      := /var/lib/kerf-e2e/kerf-demo
export KERF_CACHE           := $(CACHE)
export KERF_CLUSTER         := $(CLUSTER)
export KERF_NVIDIA_PROGRAMS := $(CACHE)/nvidia-programs
export KERF_HELM            := $(HELM)
export KERF_NEIGHBOURS      := $(TARGET)/neighbours
export CARGO_TARGET_DIR     := $(TARGET)

.DEFAULT_GOAL := help

help: ## This index
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo "  KUBE=1.37.2   Kubernetes version (1.34.4, 1.35.4, 1.36.3, 1.37.2)"
	@echo "  GATES=dra     feature gates: dra (all that kerf uses) or default (the version's own)"
	@echo "  TEST=name     only the scenarios whose name contains this"
	@echo "  PROFILE=debug of the programs in the images: debug (line tables stripped) or release"
	@echo "  SECONDS_EACH=60, TARGETS=journal   how long to fuzz each target, and which"

setup: ## Install what building and testing needs (Debian 12, root)
	@.ci/setup

build: $(CLUSTER) ## Build everything, tests included
	cargo build --workspace --all-targets

$(CLUSTER): $(shell find e2e/cluster -name '*.go' -o -name 'go.*')
	@mkdir -p $(TARGET)
	cd e2e/cluster && CGO_ENABLED=0 go build -trimpath -o $@ .

test: lint doc deny unit e2e ## Everything: format, lints, documentation, licences, unit, integration and end-to-end tests

lint: ## Formatting and lints, warnings denied
	cargo fmt --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo clippy --workspace --test scenarios -- -D warnings
	cargo fmt --check --manifest-path fuzz/Cargo.toml
	cargo clippy --locked --manifest-path fuzz/Cargo.toml --no-default-features --all-targets -- -D warnings
	cd e2e/cluster && test -z "$$(gofmt -l .)" && go vet ./...

helm: $(HELM) ## Helm, into the cache

$(HELM): | $(CLUSTER)
	$(CLUSTER) build helm

neighbours: $(CLUSTER) ## NVIDIA's programs that scenarios run beside kerf, into the cache
	@$(CLUSTER) neighbours e2e/neighbours $(KERF_NEIGHBOURS) >/dev/null

# The programs of the whole workspace: for the three packages alone cargo would compile the dependencies again, with other features.
programs-debug: build $(HOOK)
programs-release: $(HOOK)
	cargo build --release --workspace --lib $(addprefix --bin ,kerf-controller kerf-kubelet-plugin nvml-sim nvidia-smi)

# Linked statically, as it runs on hosts of any C library; in a profile of its own, which a plain `cargo build` does not touch.
$(HOOK): FORCE
	cargo rustc --quiet --locked --profile hook --package kerf-cdi-hook --bin kerf-cdi-hook -- -C target-feature=+crt-static

FORCE:

images: export PATH := $(CYCLONEDX)/bin:$(PATH)
images: programs-$(PROFILE) $(CYCLONEDX)/bin/cargo-cyclonedx $(BASE)/current.tar ## Container images as OCI archives, in target/images (PROFILE)
	@.ci/images.sh $(TARGET)/$(PROFILE) $(TARGET)/images $(BASE)/current.tar

images-check: export PATH := $(CYCLONEDX)/bin:$(PATH)
images-check: images ## Make the images and their base again from nothing: the digests must be the same
	@rm -rf $(AGAIN) && mkdir $(AGAIN)
	@.ci/images.sh $(TARGET)/$(PROFILE) $(TARGET)/images $(BASE)/current.tar >$(AGAIN)/first
	@.ci/base-image.sh $(AGAIN)/base
	@.ci/images.sh $(TARGET)/$(PROFILE) $(AGAIN) $(AGAIN)/base/current.tar >$(AGAIN)/again
	@diff $(AGAIN)/first $(AGAIN)/again && rm -rf $(AGAIN)

$(BASE)/current.tar:
	.ci/base-image.sh $(BASE)

$(CYCLONEDX)/bin/cargo-cyclonedx:
	CARGO_TARGET_DIR=$(CYCLONEDX).build cargo install -q cargo-cyclonedx --version $(notdir $(CYCLONEDX)) --locked --root $(CYCLONEDX)
	rm -rf $(CYCLONEDX).build

deny: $(DENY)/bin/cargo-deny ## Licences, sources, duplicate dependencies
	$< --log-level error check bans licenses sources
	$< --log-level error --manifest-path fuzz/Cargo.toml --config deny.toml check licenses sources

$(DENY)/bin/cargo-deny:
	CARGO_TARGET_DIR=$(DENY).build cargo install -q cargo-deny --version $(notdir $(DENY)) --locked --root $(DENY)
	rm -rf $(DENY).build

unit: build $(HELM) neighbours ## Unit and integration tests, no cluster needed
	cargo test --workspace
	cargo test --locked --manifest-path crates/cdi/oracle/Cargo.toml --target-dir $(TARGET)/oracle
	cd e2e/cluster && go test ./...

install-yaml: $(HELM) ## Write deploy/install.yaml from the chart
	KERF_UPDATE=1 cargo test --quiet -p kerf-e2e --test it install_yaml

torture: build ## The long tests in full (KERF_SEED chooses what `make test` runs of them)
	KERF_TORTURE=all KERF_MODEL_OPS=10000 cargo test --workspace --test it -- --nocapture survives_sigkill model:: fault_matrix::
	KERF_TORTURE_PODS=200 KERF_OUTAGE_SECONDS=120 $(MAKE) e2e TEST="faults:: torture::"

doc: ## API documentation, warnings denied
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

# On the default gates of 1.34 and 1.35 there are no partitions: make e2e KUBE=1.34.4 GATES=default TEST=server_supports
e2e: build images $(HELM) neighbours ## Scenarios on a real Kubernetes (KUBE, GATES, TEST)
	cargo test --workspace --test scenarios --no-run
	$(CLUSTER) down --purge
	$(CLUSTER) up --kubernetes $(KUBE) --feature-gates $(GATES)
	$(CLUSTER) load-image $(IMAGES)
	rm -f $(TARGET)/e2e/failures
	RUST_BACKTRACE=0 $(CLUSTER) exec -- cargo test --offline --workspace --test scenarios -- --test-threads=1 $(TEST); \
	  status=$$?; $(CLUSTER) down --purge; cat $(TARGET)/e2e/failures 2>/dev/null; exit $$status

# Coverage as cargo-fuzz asks for it, which a stable Rust can give. Sanitizers it cannot, and what is checked has no `unsafe`.
fuzz: HOST = $(shell rustc --print host-tuple)
fuzz: export RUSTFLAGS = -Cpasses=sancov-module -Cllvm-args=-simplifycfg-branch-fold-threshold=0 \
  $(addprefix -Cllvm-args=-sanitizer-coverage-,level=4 inline-8bit-counters pc-table trace-compares stack-depth)
fuzz: ## Look for inputs that break a promise (SECONDS_EACH, TARGETS)
	cargo build --locked --release --manifest-path fuzz/Cargo.toml --target $(HOST) --target-dir $(FUZZ)
	@for target in $(TARGETS); do \
	  mkdir -p $(FUZZ)/corpus/$$target; \
	  $(FUZZ)/$(HOST)/release/$$target -max_total_time=$(SECONDS_EACH) -timeout=10 -rss_limit_mb=2048 -print_funcs=0 \
	    -print_final_stats=1 -artifact_prefix=$(FUZZ)/$$target- $(FUZZ)/corpus/$$target fuzz/corpus/$$target \
	    >$(FUZZ)/$$target.log 2>&1 || { tail -n 40 $(FUZZ)/$$target.log; exit 1; }; \
	  echo "$$target: $$(grep -ah DONE $(FUZZ)/$$target.log)"; \
	done

bench: $(CLUSTER) $(HELM) ## Measure prepare, unprepare, memory and size (target/bench/report.json)
	cargo build --release --workspace --lib $(addprefix --bin ,kerf-controller kerf-kubelet-plugin nvml-sim nvidia-smi kerf-bench)
	$(MAKE) images PROFILE=release
	$(CLUSTER) down --purge
	$(CLUSTER) up --kubernetes $(KUBE) --feature-gates $(GATES)
	$(CLUSTER) load-image $(IMAGES)
	$(CLUSTER) exec -- $(TARGET)/release/kerf-bench --report $(TARGET)/bench/report.json; \
	  status=$$?; $(CLUSTER) down --purge; exit $$status

contract: ## Check what kerf relies on NVML for, against a driver (DRIVER_ROOT=/, CARVE=gpu address, REPORT=file)
	cargo run --quiet -p kerf-nvml-contract -- --driver-root $(DRIVER_ROOT) \
	  $(addprefix --carve ,$(CARVE)) $(addprefix --report ,$(REPORT))

# A KUBECONFIG of the environment is not asked for: only who names it here wants the demo there.
ifeq ($(origin KUBECONFIG),command line)
demo: programs-debug helm
	@env -u KERF_CLUSTER KUBECONFIG=$(abspath $(KUBECONFIG)) $(TARGET)/debug/kerf-demo visit $(VISIT)
	@echo
	@echo "kerf goes on running. Look around:  kubectl get gpunodes,resourceslices"
	@echo "Take it away again:                 make demo-down KUBECONFIG=$(KUBECONFIG)"

demo-down: programs-debug helm
	@env -u KERF_CLUSTER KUBECONFIG=$(abspath $(KUBECONFIG)) $(TARGET)/debug/kerf-demo leave
else
demo: ## Show kerf at work on a cluster of its own with simulated GPUs, or on yours (KUBECONFIG=file)
	@$(MAKE) --no-print-directory setup images helm
	@$(MAKE) --no-print-directory demo-down
	@$(CLUSTER) up --kubernetes $(KUBE) --feature-gates $(GATES)
	@$(CLUSTER) load-image $(IMAGES)
	@$(CLUSTER) exec -- $(TARGET)/debug/kerf-demo up --state $(DEMO)
	@echo
	@echo "kerf goes on running. Look around:  $(CLUSTER) exec -- kubectl get gpunodes,resourceslices"
	@echo "kubeconfig (inside the cluster's network namespace): $$($(CLUSTER) kubeconfig)"
	@echo "Stop it and leave nothing behind:   make demo-down"

demo-down: $(CLUSTER) ## End the demo and leave nothing behind
	@if [ -f $(DEMO)/process ]; then $(TARGET)/debug/kerf-demo down --state $(DEMO); fi
	@$(CLUSTER) down --purge
	@rm -rf $(DEMO)
endif

.PHONY: FORCE help setup build test lint helm neighbours programs-debug programs-release images images-check deny unit install-yaml torture doc e2e fuzz bench contract demo demo-down
