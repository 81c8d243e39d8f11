package flowcontrol_test

import (
	"context"
	"errors"
	"flag"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/flowcontrol"
)

var rounds = flag.Int("rounds", 20, "random rounds of TestRandom, of 200 requests each")

// TestRandom has crowds of requests come, leave, complete, hang and be evicted, on endpoints
// that come and go, all at once and in real time. Nothing may be left, no victim may matter as
// much as what it ended for, and nobody may be admitted whose context had ended.
func TestRandom(t *testing.T) {
	for seed := range uint64(*rounds) {
		rng := rand.New(rand.NewPCG(seed, 1))
		ev := evictor.New(evictor.WithAborter(abort.AborterFunc(func(context.Context, *abort.Handle, abort.Reason) error {
			if rand.IntN(5) == 0 {
				return errors.New("no")
			}
			return nil
		})))
		pool := flowcontrol.NewPool(ev, flowcontrol.WithEvictionBelow(0), flowcontrol.WithObserver(func(d flowcontrol.Decision) {
			for _, v := range d.Victims {
				if v.Priority >= d.For.Priority || v.Priority >= 0 {
					t.Errorf("victim of priority %d: %v", v.Priority, d)
				}
			}
			if (len(d.Victims) > 0) != (d.Why == flowcontrol.KV || d.Why == flowcontrol.Slot || d.Why == flowcontrol.Prefill) || d.String() == "" {
				t.Errorf("decision %+v", d)
			}
		}))
		names := []string{"a", "b", "c"}
		for _, n := range names {
			pool.SetEndpoint(flowcontrol.Endpoint{Name: n, Capacity: 20_000, Slots: 8})
		}
		stop := make(chan struct{})
		var others, requests sync.WaitGroup
		others.Go(func() {
			rng := rand.New(rand.NewPCG(seed, 2))
			for {
				select {
				case <-stop:
					return
				case <-time.After(time.Millisecond):
				}
				n := names[rng.IntN(3)]
				switch rng.IntN(40) {
				case 0:
					pool.RemoveEndpoint("c")
				case 1:
					pool.SetEndpoint(flowcontrol.Endpoint{Name: "c", Capacity: 20_000, Slots: rng.IntN(9)})
				case 2:
					pool.RetryAfter()
				case 3:
					pool.Observe(n, flowcontrol.Sample{Used: rng.Int64N(60_000) - 20_000, Capacity: rng.Int64N(2) * 20_000, At: time.Now().Add(time.Duration(rng.IntN(200)-100) * time.Millisecond)})
				default:
					used := int64(0)
					for _, e := range pool.Status().Endpoints {
						if e.Name == n {
							used = e.Occupied - e.Held
						}
					}
					pool.Observe(n, flowcontrol.Sample{Used: used, At: time.Now()})
				}
			}
		})
		for range 200 {
			r := flowcontrol.Request{Priority: rng.IntN(5) - 3, Tokens: rng.Int64N(4000), Evictions: rng.IntN(5)}
			if rng.IntN(4) == 0 {
				r.Endpoints = names[rng.IntN(3):]
			}
			wait, run, kind := time.Duration(rng.IntN(60))*time.Millisecond, time.Duration(rng.IntN(20))*time.Millisecond, rng.IntN(10)
			start := time.Duration(rng.IntN(100)) * time.Millisecond
			requests.Go(func() {
				time.Sleep(start)
				oneRequest(t, pool, r, kind, wait, run)
			})
		}
		requests.Wait()
		close(stop)
		others.Wait()
		deadline := time.Now().Add(10 * time.Second)
		for left := ""; ; time.Sleep(5 * time.Millisecond) {
			s := pool.Status()
			left = ""
			for _, e := range s.Endpoints {
				if e.Active+e.Ending != 0 || e.Held != 0 || e.Backlog != 0 {
					left = "endpoints"
				}
			}
			if s.Waiting != 0 || ev.Len() != 0 || s.Budget < 0 {
				left = "requests"
			}
			if left == "" && !poolRuns() {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("seed %d: %s are left: %+v, %d tracked, goroutines: %v", seed, left, s, ev.Len(), poolRuns())
			}
		}
	}
}

// oneRequest is a request's life, of some kind.
func oneRequest(t *testing.T, pool *flowcontrol.Pool, r flowcontrol.Request, kind int, wait, run time.Duration) {
	if kind == 0 { // without a handle
		ctx, cancel := context.WithTimeout(t.Context(), wait)
		defer cancel()
		if l, err := pool.Admit(ctx, r); err == nil {
			time.Sleep(run)
			l.Release()
		}
		return
	}
	own, ctx := abort.New(t.Context())
	defer own.Close()
	waits, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	l, err := pool.Admit(waits, r)
	if err != nil {
		return
	}
	if kind == 1 && own.Handle().Outcome() == abort.Pending {
		if l2, err := pool.Admit(waits, r); err == nil && r.Tokens%2 == 0 {
			l2.Release()
		}
	}
	if kind < 8 {
		own.Advance(abort.Streaming)
	}
	for end := time.Now().Add(run); time.Now().Before(end); time.Sleep(time.Millisecond) {
		own.Count(1, 10)
		if ctx.Err() != nil {
			break
		}
	}
	switch kind {
	case 2:
		time.Sleep(50 * time.Millisecond) // hangs
	case 3:
		own.Handle().Abort(abort.Canceled)
	case 4:
		l.Release()
	case 5:
	default:
		own.Settle(abort.Completed)
	}
}

// poolRuns reports whether a goroutine is in package flowcontrol.
func poolRuns() bool {
	buf := make([]byte, 1<<20)
	return strings.Contains(string(buf[:runtime.Stack(buf, true)]), "flowcontrol.(*Pool)")
}
