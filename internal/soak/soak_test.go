package main

import (
	"testing"
	"time"

	"github.com/extevict/extevict/internal/envoy"
)

// TestSoak is make soak for a few seconds.
func TestSoak(t *testing.T) {
	bin, err := envoy.Find()
	if err != nil {
		t.Fatal(err)
	}
	if err := run(t.Context(), t.Output(), config{bin: bin, seed: 1, clients: 20, length: 5 * time.Second, round: 3 * time.Second}); err != nil {
		t.Error(err)
	}
}
