package evictor_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
)

// TestParallel: requests come, move, advance, leave, complete and are evicted and aborted
// by id, all at once. As many requests were aborted as there were winners, none that a
// demand may not touch, and nothing is left (invariants 1, 3 and 6).
func TestParallel(t *testing.T) {
	for _, failing := range []bool{false, true} {
		t.Run(fmt.Sprintf("failing Aborter %v", failing), func(t *testing.T) {
			before := runtime.NumGoroutine()
			var opts []evictor.Option
			if failing {
				opts = append(opts, evictor.WithAborter(abort.AborterFunc(func(_ context.Context, h *abort.Handle, _ abort.Reason) error {
					switch rand.IntN(8) {
					case 0:
						return errors.New("no")
					case 1:
						panic("boom")
					case 2:
						runtime.Gosched()
					}
					return nil
				})))
			}
			ev := evictor.New(opts...)
			var reg abort.Registry
			var won, byID, aborted, canceled atomic.Int64
			var stop atomic.Bool
			endpoint := func() string { return []string{"a", "b", "c"}[rand.IntN(3)] }
			evict := func() {
				for !stop.Load() {
					d := evictor.Demand{N: 1 + rand.IntN(3), Endpoint: []string{"", "a", "b", "c"}[rand.IntN(4)], Reason: abort.Preempted}
					switch rand.IntN(6) {
					case 0:
						d.Before = abort.Streaming
					case 1:
						d.Spare = func(h *abort.Handle) bool { return rand.IntN(2) == 0 }
					case 2:
						d.Tokens, d.N = 1+rand.Int64N(4), 0
					}
					hs, _ := ev.Evict(context.Background(), d)
					won.Add(int64(len(hs)))
					for _, h := range hs {
						if h.Outcome() != abort.Aborted {
							t.Errorf("a victim is %v", h.Outcome())
						}
					}
					if rand.IntN(4) == 0 {
						byID.Add(int64(reg.Abort("id", abort.Canceled)))
					}
					runtime.Gosched()
				}
			}
			serve := func() {
				for range *rounds {
					parent, leave := context.WithCancel(context.Background())
					own, ctx := abort.New(parent)
					priority := rand.IntN(4) - 3 // 0 is not for a demand
					if rand.IntN(4) == 0 {
						reg.Add("id", own.Handle())
					}
					var in sync.WaitGroup
					if rand.IntN(2) == 0 {
						in.Go(func() {
							ev.TrackRequests(ctx, at(endpoint(), priority), at(endpoint(), 9))
							if rand.IntN(4) == 0 {
								ev.TrackRequests(ctx)
							}
						})
					}
					ev.TrackRequests(ctx, at(endpoint(), priority))
					released := false
					if rand.IntN(2) == 0 {
						runtime.Gosched()
					}
					switch rand.IntN(4) {
					case 0:
						leave()
					case 1:
						own.Settle(abort.Completed)
					case 2:
						own.Advance(abort.Held)
						released = own.Advance(abort.Streaming)
					}
					_ = released
					in.Wait()
					own.Close()
					leave()
					if e, ok := own.Handle().Err().(*abort.Error); ok && e.Reason == abort.Preempted {
						aborted.Add(1)
						if priority >= 0 {
							t.Errorf("priority %d was evicted", priority)
						}
					} else if ok {
						canceled.Add(1)
					}
				}
			}
			together(func() { together(serve, serve, serve); stop.Store(true) }, evict, evict)
			if won.Load() != aborted.Load() || byID.Load() != canceled.Load() {
				t.Errorf("evicted %d of %d, by id %d of %d", won.Load(), aborted.Load(), byID.Load(), canceled.Load())
			}
			if ev.Len() != 0 || reg.Len() != 0 {
				t.Errorf("%d tracked, %d registered at the end", ev.Len(), reg.Len())
			}
			for range ev.All() {
				t.Error("All: somebody at the end")
			}
			if *rounds >= 1000 && won.Load() == 0 {
				t.Error("no race: nobody was evicted")
			}
			for range 100 { // a goroutine that has returned may take a moment to be gone
				if runtime.NumGoroutine() <= before {
					return
				}
				time.Sleep(10 * time.Millisecond)
			}
			t.Errorf("%d goroutines, %d before", runtime.NumGoroutine(), before)
		})
	}
}

// TestCollisions: one request, two demands, and everything else that can end it, at once.
func TestCollisions(t *testing.T) {
	for i := range *rounds {
		var opts []evictor.Option
		if i%2 == 0 {
			opts = append(opts, evictor.WithAborter(abort.AborterFunc(func(context.Context, *abort.Handle, abort.Reason) error {
				if rand.IntN(4) == 0 {
					return errors.New("no")
				}
				return nil
			})))
		}
		ev := evictor.New(opts...)
		parent, leave := context.WithCancel(context.Background())
		own, ctx := abort.New(parent)
		h := own.Handle()
		var won atomic.Int32
		evict := func(d evictor.Demand) func() {
			return func() {
				hs, _ := ev.Evict(context.Background(), d)
				won.Add(int32(len(hs)))
				if len(hs) == 1 && (hs[0] != h || ctx.Err() == nil) {
					t.Error("another victim, or one that runs on")
				}
			}
		}
		fs := []func(){
			func() { ev.TrackRequests(ctx, at("e", -1)) },
			evict(evictor.Demand{N: 1}),
			evict(evictor.Demand{Tokens: 1, Endpoint: "e"}),
		}
		switch rand.IntN(4) {
		case 0:
			fs = append(fs, leave)
		case 1:
			fs = append(fs, func() { own.Settle(abort.Completed) })
		case 2:
			fs = append(fs, func() {
				if h.Abort(abort.Canceled) {
					won.Add(1)
				}
			})
		case 3:
			fs = append(fs, own.Close)
		}
		if rand.IntN(2) == 0 {
			ev.TrackRequests(ctx, at("e", -1), at("f", -1))
		}
		together(fs...)
		oc := h.Outcome()
		if won.Load() > 1 || (won.Load() == 1) != (oc == abort.Aborted) {
			t.Fatalf("%d winners, outcome %v", won.Load(), oc)
		}
		if oc != abort.Pending {
			if hs, err := ev.Evict(context.Background(), evictor.Demand{N: 1}); len(hs) != 0 || err != nil {
				t.Fatalf("evicted again: %v", err)
			}
		}
		own.Close()
		leave()
		if ev.Len() != 0 {
			t.Fatalf("Len = %d at the end", ev.Len())
		}
	}
}
