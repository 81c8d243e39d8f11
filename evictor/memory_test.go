package evictor_test

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"weak"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
)

// heap is what is reachable.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// Invariant 3: requests that come and go leave nothing, however many endpoints and
// priorities they had.
func TestFlatMemory(t *testing.T) {
	n := min(max(*rounds*10, 20_000), 1_000_000)
	for _, tc := range []struct {
		name string
		req  func(i int) abort.Request
	}{
		{"one endpoint", func(i int) abort.Request { return at("e", -1) }},
		{"many endpoints", func(i int) abort.Request { return at(fmt.Sprint("10.0.0.1:", i), -1) }},
		{"many priorities", func(i int) abort.Request { return at("e", -i) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ev := evictor.New()
			before := heap()
			for i := range n {
				own, ctx := abort.New(context.Background())
				ev.TrackRequests(ctx, tc.req(i))
				switch i % 3 {
				case 0:
					own.Settle(abort.Completed)
				case 1:
					own.Handle().Abort(abort.Canceled)
				}
				own.Close()
			}
			if grown := heap() - before; grown > 48<<10 || ev.Len() != 0 {
				t.Errorf("%d B grown after %d requests, Len = %d", grown, n, ev.Len())
			}
			runtime.KeepAlive(ev)
		})
	}
}

// Invariant 3: after a flood an Evictor gives back what it took, also for the tables of
// endpoints and priorities.
func TestGivesBack(t *testing.T) {
	n := min(max(*rounds*3, 6_000), 10_000)
	for _, tc := range []struct {
		name string
		reqs func(i int) []abort.Request
	}{
		{"one endpoint", func(i int) []abort.Request { return []abort.Request{at("e", -1)} }},
		{"many endpoints", func(i int) []abort.Request { return []abort.Request{at(fmt.Sprint("10.0.0.1:", i), -1)} }},
		{"many endpoints each", func(i int) []abort.Request {
			return []abort.Request{at(fmt.Sprint("a", i), -1), at(fmt.Sprint("b", i), -1), at("c", -1)}
		}},
		{"many priorities", func(i int) []abort.Request { return []abort.Request{at("e", -i)} }},
	} {
		for _, how := range []string{"finished", "evicted"} {
			t.Run(tc.name+"/"+how, func(t *testing.T) {
				ev := evictor.New()
				all := make([]*abort.Owner, n)
				before := heap()
				for i := range all {
					own, ctx := abort.New(context.Background())
					all[i] = own
					ev.TrackRequests(ctx, tc.reqs(i)...)
				}
				took := heap() - before
				switch how {
				case "finished":
					for _, own := range all {
						own.Settle(abort.Completed)
					}
				case "evicted":
					if hs, err := ev.Evict(context.Background(), evictor.Demand{N: n, Below: 1}); len(hs) != n || err != nil {
						t.Fatalf("%d evicted, %v", len(hs), err)
					}
				}
				clear(all)
				// A few empty ones may stay.
				if kept := heap() - before; ev.Len() != 0 || kept > 32<<10 {
					t.Errorf("keeps %d B of %d B, Len = %d", kept, took, ev.Len())
				}
				runtime.KeepAlive(ev)
				runtime.KeepAlive(all)
			})
		}
	}
}

// TestKeptVictim: whoever keeps a victim's handle does not keep the Evictor.
func TestKeptVictim(t *testing.T) {
	type big struct {
		evictor.Evictor
		_ [1 << 10]byte
	}
	own, ctx := abort.New(context.Background())
	defer own.Close()
	ev := &big{}
	p := weak.Make(ev)
	ev.TrackRequests(ctx, at("e", -1), at("f", -1))
	if hs, err := ev.Evict(context.Background(), evictor.Demand{N: 1}); len(hs) != 1 || err != nil {
		t.Fatalf("%d evicted, %v", len(hs), err)
	}
	runtime.KeepAlive(ev)
	ev = nil
	runtime.GC()
	runtime.GC()
	if p.Value() != nil {
		t.Error("the Evictor is kept")
	}
	runtime.KeepAlive(ctx)
}
