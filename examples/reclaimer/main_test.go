package main

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
)

// TestScheduler fills all places with sheddable requests; two that matter more are let in
// within a few milliseconds, and no more than that takes are evicted.
func TestScheduler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const places = 20
		ev := evictor.New()
		s := newScheduler(ev, places)
		ticks := make(chan time.Time)
		go s.run(ticks)
		tick := func() {
			time.Sleep(time.Millisecond)
			ticks <- time.Now()
			synctest.Wait()
		}
		var evicted, done, started atomic.Int32
		start := func(priority int) *abort.Owner {
			own, ctx := abort.New(t.Context())
			own.Handle().OnSettle(func(o abort.Outcome) {
				if o == abort.Aborted {
					evicted.Add(1)
					time.AfterFunc(3*time.Millisecond, own.Close)
				}
			})
			go func() {
				if s.wait(ctx, priority) == nil && priority > 0 {
					started.Add(1)
				}
				done.Add(1)
			}()
			synctest.Wait()
			return own
		}
		var owners []*abort.Owner
		for range places {
			owners = append(owners, start(-1))
		}
		for range 10 {
			tick()
		}
		if n := done.Load(); n != 18 || evicted.Load() != 0 {
			t.Errorf("%d dispatched, %d evicted", n, evicted.Load())
		}
		owners = append(owners, start(1), start(1))
		for range 10 {
			tick()
		}
		if started.Load() != 2 || evicted.Load() != 2 {
			t.Errorf("%d urgent ones dispatched, %d evicted", started.Load(), evicted.Load())
		}
		close(ticks)
		for _, o := range owners {
			o.Close()
		}
		synctest.Wait()
		if ev.Len() != 0 || s.inside != 0 || int(done.Load()) != len(owners) {
			t.Errorf("%d tracked, %d inside, %d of %d done", ev.Len(), s.inside, done.Load(), len(owners))
		}
	})
}
