package flowcontrol_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/flowcontrol"
)

// A stream is a request as an ext_proc server has it: when it is aborted, its stream ends
// after a while.
type stream struct {
	own *abort.Owner
	ctx context.Context
}

const confirm = 3 * time.Millisecond

func newStream(t *testing.T) *stream { return newStreamThatEnds(t, confirm) }

// newStreamThatEnds returns a stream that ends so long after an abort.
func newStreamThatEnds(t *testing.T, after time.Duration) *stream {
	own, ctx := abort.New(t.Context())
	own.Handle().OnSettle(func(o abort.Outcome) {
		if o == abort.Aborted {
			time.AfterFunc(after, own.Close)
		}
	})
	return &stream{own, ctx}
}

// world is a Pool with endpoints that tell their usage.
type world struct {
	*flowcontrol.Pool
	ev *evictor.Evictor

	mu        sync.Mutex // guards decisions
	decisions []flowcontrol.Decision
}

func newWorld(ev *evictor.Evictor, opts ...flowcontrol.Option) *world {
	w := &world{ev: ev}
	w.Pool = flowcontrol.NewPool(ev, append(opts, flowcontrol.WithObserver(func(d flowcontrol.Decision) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.decisions = append(w.decisions, d)
	}))...)
	return w
}

// sample has the endpoints tell every 50 ms what used says, until the test's end.
func (w *world) sample(t *testing.T, used func(endpoint string) int64, endpoints ...string) {
	go func() { // ends with the test
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			for _, e := range endpoints {
				w.Observe(e, flowcontrol.Sample{Used: used(e), At: time.Now()})
			}
			select {
			case <-tick.C:
			case <-t.Context().Done():
				return
			}
		}
	}()
}

// tracked is what the requests in flight hold on an endpoint: a gauge that is never wrong.
func (w *world) tracked(endpoint string) (n int64) {
	for h := range w.ev.All() {
		for _, r := range h.Requests() {
			if r.Endpoint == endpoint {
				n += r.Tokens
			}
		}
	}
	return n
}

func (w *world) whys() (whys []string) {
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, d := range w.decisions {
		whys = append(whys, fmt.Sprintf("%s %s %d", d.Why, d.Endpoint, len(d.Victims)))
	}
	return whys
}

// fill admits n sheddable requests, of the given size and with their first chunks there.
func (w *world) fill(t *testing.T, n int, tokens int64) (ss []*stream) {
	t.Helper()
	time.Sleep(time.Millisecond) // no sample falls between a first chunk and what holds it
	for range n {
		s := newStream(t)
		if _, err := w.Admit(s.ctx, flowcontrol.Request{Priority: -1, Tokens: tokens}); err != nil {
			t.Fatal(err)
		}
		s.own.Advance(abort.Streaming)
		s.own.Count(1, 100)
		ss = append(ss, s)
	}
	time.Sleep(200 * time.Millisecond) // samples have shown them
	return ss
}

func aborted(ss []*stream) (n int) {
	for _, s := range ss {
		if s.own.Handle().Outcome() == abort.Aborted {
			n++
		}
	}
	return n
}

// TestPreempts has an urgent request wait for a full endpoint.
func TestPreempts(t *testing.T) {
	for _, c := range []struct {
		name    string
		opts    []flowcontrol.Option
		samples bool
		prio    int
		victims int
		whys    []string
	}{
		{"no option", nil, true, 1, 0, []string{"disabled  0"}},
		{"evicts", []flowcontrol.Option{flowcontrol.WithEvictionBelow(0)}, true, 1, 1, []string{"kv a 1"}},
		{"no samples", []flowcontrol.Option{flowcontrol.WithEvictionBelow(0)}, false, 1, 0, []string{"stale  0"}},
		{"dry run", []flowcontrol.Option{flowcontrol.WithEvictionBelow(0), flowcontrol.WithDryRun()}, true, 1, 0, []string{"kv a 1"}},
		{"spares what has started", []flowcontrol.Option{flowcontrol.WithEvictionBelow(0), flowcontrol.WithSpareStarted()}, true, 1, 0, []string{"nothing  0"}},
		{"sheddable itself", []flowcontrol.Option{flowcontrol.WithEvictionBelow(0)}, true, -1, 0, nil},
		{"nobody below", []flowcontrol.Option{flowcontrol.WithEvictionBelow(-1)}, true, 1, 0, []string{"nothing  0"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(evictor.New(), c.opts...)
				w.SetEndpoint(flowcontrol.Endpoint{Name: "a", Capacity: 16_000})
				if c.samples {
					w.sample(t, w.tracked, "a")
				}
				low := w.fill(t, 7, 2000)
				urgent := newStream(t)
				ctx, cancel := context.WithTimeout(urgent.ctx, 300*time.Millisecond)
				defer cancel()
				start := time.Now()
				lease, err := w.Admit(ctx, flowcontrol.Request{Priority: c.prio, Tokens: 2000})
				synctest.Wait()
				if got := aborted(low); got != c.victims {
					t.Errorf("%d were evicted, want %d", got, c.victims)
				}
				if c.victims > 0 {
					if err != nil || lease.Endpoint() != "a" || time.Since(start) > 60*time.Millisecond {
						t.Errorf("admitted to %v after %v, error %v", lease, time.Since(start), err)
					}
				} else if err != context.DeadlineExceeded {
					t.Errorf("admitted, error %v, evicted %d", err, aborted(low))
				}
				if d := cmp.Diff(c.whys, w.whys()); d != "" {
					t.Errorf("decisions: -want +got:\n%s", d)
				}
				for _, d := range w.decisions {
					if text := d.String(); !strings.HasPrefix(text, "for a request of priority 1 that has waited 0s: ") {
						t.Error(text)
					}
				}
				// All end, and nothing is left.
				urgent.own.Close()
				for _, s := range low {
					s.own.Settle(abort.Completed)
					s.own.Close()
				}
				if n := w.ev.Len(); n != 0 {
					t.Errorf("%d are still tracked", n)
				}
				time.Sleep(2 * time.Second)
				ctx, cancel = context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				if l, err := w.Admit(ctx, flowcontrol.Request{Tokens: 15_000}); err != nil {
					t.Errorf("not all room came back: %v", err)
				} else {
					l.Release()
					l.Release()
				}
			})
		})
	}
}

// TestLeaseEnds checks that each way in which a request can end gives its room back, once.
func TestLeaseEnds(t *testing.T) {
	for name, end := range map[string]func(*stream, *flowcontrol.Lease){
		"completed":            func(s *stream, _ *flowcontrol.Lease) { s.own.Settle(abort.Completed) },
		"closed":               func(s *stream, _ *flowcontrol.Lease) { s.own.Close() },
		"aborted by somebody":  func(s *stream, _ *flowcontrol.Lease) { s.own.Handle().Abort(abort.Canceled) },
		"released":             func(_ *stream, l *flowcontrol.Lease) { l.Release() },
		"released, then ended": func(s *stream, l *flowcontrol.Lease) { l.Release(); s.own.Close() },
		"ended, then released": func(s *stream, l *flowcontrol.Lease) { s.own.Settle(abort.Completed); l.Release(); l.Release() },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(evictor.New())
				w.SetEndpoint(flowcontrol.Endpoint{Name: "a", Capacity: 16_000, Slots: 1})
				for range 3 { // more room than there was would let two in at once
					a, b := newStream(t), newStream(t)
					l, err := w.Admit(a.ctx, flowcontrol.Request{Tokens: 100})
					if err != nil {
						t.Fatal(err)
					}
					var second atomic.Bool
					go func() { // ends at the latest when b does
						if _, err := w.Admit(b.ctx, flowcontrol.Request{Tokens: 100}); err == nil {
							second.Store(true)
						}
					}()
					time.Sleep(time.Second)
					if second.Load() {
						t.Fatal("two in one slot")
					}
					end(a, l)
					time.Sleep(100 * time.Millisecond)
					if !second.Load() {
						t.Fatal("the slot did not come back")
					}
					b.own.Settle(abort.Completed)
					a.own.Close()
					b.own.Close()
				}
				if w.ev.Len() != 0 {
					t.Error("still tracked")
				}
			})
		})
	}
}

// TestErrors checks what Admit says of requests that can't be admitted, and of those that leave.
func TestErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(evictor.New(), flowcontrol.WithEvictionBelow(0), flowcontrol.WithMaxWaiting(2))
		gone := errors.New("gone")
		for _, c := range []struct {
			name string
			req  flowcontrol.Request
			want error
		}{
			{"no endpoint", flowcontrol.Request{Tokens: 1}, flowcontrol.ErrInfeasible},
		} {
			if _, err := w.Admit(t.Context(), c.req); err != c.want {
				t.Errorf("%s: %v, want %v", c.name, err, c.want)
			}
		}
		w.SetEndpoint(flowcontrol.Endpoint{Name: "a", Capacity: 10_000, Slots: 1})
		for _, c := range []struct {
			name string
			req  flowcontrol.Request
			want error
		}{
			{"too large", flowcontrol.Request{Tokens: 10_000}, flowcontrol.ErrInfeasible},
			{"as large as can be", flowcontrol.Request{Tokens: 1<<63 - 1}, flowcontrol.ErrInfeasible},
			{"nowhere", flowcontrol.Request{Endpoints: []string{}}, flowcontrol.ErrInfeasible},
			{"elsewhere", flowcontrol.Request{Endpoints: []string{"b", ""}}, flowcontrol.ErrInfeasible},
		} {
			if _, err := w.Admit(t.Context(), c.req); err != c.want {
				t.Errorf("%s: %v, want %v", c.name, err, c.want)
			}
		}
		if _, err := w.Admit(t.Context(), flowcontrol.Request{Priority: 5, Tokens: -7}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		errs := make(chan error, 4)
		admit := func(ctx context.Context, priority int) {
			_, err := w.Admit(ctx, flowcontrol.Request{Priority: priority, Tokens: 100})
			errs <- err
		}
		go admit(ctx, 1)
		go admit(ctx, 2)
		synctest.Wait()
		go admit(ctx, 1) // the last of those that matter least
		synctest.Wait()
		if e, ok := errors.AsType[*flowcontrol.OverloadedError](<-errs); !ok || e.RetryAfter < time.Second || e.RetryAfter > 30*time.Second {
			t.Errorf("error %v, want one that says when to come again", e)
		}
		cancel(gone)
		synctest.Wait()
		if a, b := <-errs, <-errs; a != gone || b != gone {
			t.Errorf("errors %v, %v, want the cause", a, b)
		}
		if _, err := w.Admit(ctx, flowcontrol.Request{}); err != gone {
			t.Errorf("error %v, want the cause", err)
		}
		go admit(t.Context(), 1)
		synctest.Wait()
		w.RemoveEndpoint("a")
		if err := <-errs; err != flowcontrol.ErrInfeasible {
			t.Errorf("its last endpoint was removed: %v", err)
		}
		w.RemoveEndpoint("a")
		w.Observe("a", flowcontrol.Sample{Used: 1, At: time.Now()})
	})
}

// TestVictimHangs checks that a victim whose stream does not end, and one whose Aborter
// fails, block nobody.
func TestVictimHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var refused *abort.Handle
		ev := evictor.New(evictor.WithAborter(abort.AborterFunc(func(_ context.Context, h *abort.Handle, _ abort.Reason) error {
			if h == refused {
				return errors.New("no")
			}
			return nil
		})))
		w := newWorld(ev, flowcontrol.WithEvictionBelow(0))
		w.SetEndpoint(flowcontrol.Endpoint{Name: "a", Capacity: 1_000_000, Slots: 4})
		w.sample(t, w.tracked, "a")
		var low []*stream
		for i := range 4 {
			s := newStreamThatEnds(t, time.Hour)
			if i < 2 {
				s = newStream(t)
			}
			if _, err := w.Admit(s.ctx, flowcontrol.Request{Priority: i - 9, Tokens: 100}); err != nil {
				t.Fatal(err)
			}
			low = append(low, s)
			time.Sleep(10 * time.Millisecond)
		}
		slices.Reverse(low)
		refused = low[3].own.Handle() // the lowest
		time.Sleep(time.Second)
		start := time.Now()
		// Fails at the lowest, then at the next, which ends.
		if _, err := w.Admit(newStream(t).ctx, flowcontrol.Request{Priority: 1, Tokens: 100}); err != nil {
			t.Fatal(err)
		}
		if w := time.Since(start); w > 100*time.Millisecond {
			t.Errorf("waited %v behind an Aborter that fails", w)
		}
		// Those that are left hang: the first is given up soon, and another one tried.
		if _, err := w.Admit(newStream(t).ctx, flowcontrol.Request{Priority: 1, Tokens: 100}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond)
		var got []abort.Outcome
		for _, s := range low {
			got = append(got, s.own.Handle().Outcome())
		}
		want := []abort.Outcome{abort.Aborted, abort.Aborted, abort.Aborted, abort.Pending}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("-want +got:\n%s", d)
		}
		for _, s := range low {
			s.own.Close()
		}
	})
}

// TestDisaggregated has one request hold two endpoints: it is one victim, found from either.
func TestDisaggregated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(evictor.New(), flowcontrol.WithEvictionBelow(0))
		for _, e := range []string{"prefill", "decode"} {
			w.SetEndpoint(flowcontrol.Endpoint{Name: e, Capacity: 100_000, Slots: 2})
		}
		w.sample(t, w.tracked, "prefill", "decode")
		var low []*stream
		for range 2 {
			s := newStream(t)
			for _, e := range []string{"prefill", "decode"} {
				if _, err := w.Admit(s.ctx, flowcontrol.Request{Priority: -1, Tokens: 5000, Endpoints: []string{e}}); err != nil {
					t.Fatal(err)
				}
			}
			low = append(low, s)
		}
		time.Sleep(200 * time.Millisecond)
		u := newStream(t)
		var leases []*flowcontrol.Lease
		for _, e := range []string{"decode", "prefill"} {
			l, err := w.Admit(u.ctx, flowcontrol.Request{Priority: 1, Tokens: 5000, Endpoints: []string{e}})
			if err != nil {
				t.Fatal(err)
			}
			leases = append(leases, l)
		}
		synctest.Wait()
		if n := aborted(low); n != 1 {
			t.Errorf("%d were evicted, want one that holds both endpoints", n)
		}
		leases[1].Release() // its prefill is done
		want := []abort.Request{{Priority: 1, Tokens: 5000, Endpoint: "decode"}}
		if d := cmp.Diff(want, u.own.Handle().Requests()); d != "" {
			t.Errorf("what it holds, -want +got:\n%s", d)
		}
		u.own.Close()
		for _, s := range low {
			s.own.Close()
		}
	})
}

// TestFixed checks that a lease without a request, which nobody could end, is never a victim.
func TestFixed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(evictor.New(), flowcontrol.WithEvictionBelow(0))
		w.SetEndpoint(flowcontrol.Endpoint{Name: "a", Capacity: 100_000, Slots: 1})
		w.sample(t, w.tracked, "a")
		l, err := w.Admit(t.Context(), flowcontrol.Request{Priority: -1, Tokens: 100})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		ctx, cancel := context.WithTimeout(newStream(t).ctx, 300*time.Millisecond)
		defer cancel()
		if _, err := w.Admit(ctx, flowcontrol.Request{Priority: 1, Tokens: 100}); err != context.DeadlineExceeded {
			t.Errorf("error %v", err)
		}
		if d := cmp.Diff([]string{"nothing  0"}, w.whys()); d != "" {
			t.Errorf("decisions: -want +got:\n%s", d)
		}
		l.Release()
	})
}

// TestOver has requests end while they wait, and before they ask, without the end of their
// contexts.
func TestOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(evictor.New())
		w.SetEndpoint(flowcontrol.Endpoint{Name: "a", Capacity: 100_000, Slots: 1})
		first, err := w.Admit(t.Context(), flowcontrol.Request{})
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range []abort.Outcome{abort.Completed, abort.Closed} {
			s := newStream(t)
			time.AfterFunc(time.Second, func() { s.own.Settle(o) })
			for range 2 {
				if _, err := w.Admit(s.ctx, flowcontrol.Request{}); err != flowcontrol.ErrOver {
					t.Errorf("%v while it waited: error %v", o, err)
				}
			}
			s.own.Close()
		}
		if s := w.Status(); s.Waiting != 0 {
			t.Errorf("%d wait", s.Waiting)
		}
		first.Release()
	})
}

// TestSamplesAge checks that a sample counts from when it was true.
func TestSamplesAge(t *testing.T) {
	for _, c := range []struct {
		age  time.Duration
		want bool
	}{{0, true}, {100 * time.Millisecond, true}, {time.Hour, false}, {-time.Millisecond, false}} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(evictor.New())
			w.SetEndpoint(flowcontrol.Endpoint{Name: "a", Capacity: 100_000})
			time.Sleep(time.Minute)
			w.Observe("a", flowcontrol.Sample{Used: 1, At: time.Now().Add(-c.age)})
			if got := w.Status().Endpoints[0].Fresh; got != c.want {
				t.Errorf("a sample that was true %v ago makes fresh evidence: %v", c.age, got)
			}
			w.Observe("a", flowcontrol.Sample{Used: 1}) // of no time: not counted
		})
	}
}

// TestProgress checks what the Pool makes of a request's chunks.
func TestProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(evictor.New())
		w.SetEndpoint(flowcontrol.Endpoint{Name: "a", Capacity: 100_000})
		s := newStream(t)
		if _, err := w.Admit(s.ctx, flowcontrol.Request{Tokens: 1000}); err != nil {
			t.Fatal(err)
		}
		look := func() flowcontrol.EndpointStatus {
			w.Observe("a", flowcontrol.Sample{Used: 0, At: time.Now()})
			return w.Status().Endpoints[0]
		}
		time.Sleep(time.Millisecond)
		if e := look(); e.Backlog < 900 || e.Occupied != 1008 {
			t.Errorf("before its first token: %+v", e)
		}
		s.own.Advance(abort.Streaming)
		s.own.Count(500, 5000)
		time.Sleep(time.Second)
		if e := look(); e.Backlog != 0 || e.Occupied < 1350 || e.Occupied > 1520 {
			t.Errorf("after 500 chunks: %+v", e)
		}
		s.own.Close()
	})
}

// TestObserverMayDoAnything has an observer that calls back, sleeps and panics.
func TestObserverMayDoAnything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ev := evictor.New()
		var pool *flowcontrol.Pool
		var told atomic.Int32
		pool = flowcontrol.NewPool(ev, flowcontrol.WithEvictionBelow(0), flowcontrol.WithObserver(func(flowcontrol.Decision) {
			told.Add(1)
			pool.RetryAfter()
			pool.Observe("a", flowcontrol.Sample{Used: 1, At: time.Now()})
			time.Sleep(time.Second)
			panic("observer")
		}))
		pool.SetEndpoint(flowcontrol.Endpoint{Name: "a", Capacity: 100_000, Slots: 1})
		low := newStream(t)
		if _, err := pool.Admit(low.ctx, flowcontrol.Request{Priority: -1}); err != nil {
			t.Fatal(err)
		}
		pool.Observe("a", flowcontrol.Sample{Used: 100, At: time.Now()})
		for range 3 {
			u := newStream(t)
			go pool.Admit(u.ctx, flowcontrol.Request{Priority: 1}) // ends with u
			time.Sleep(10 * time.Millisecond)
			defer time.Sleep(10 * time.Second) // the observer is slow
			defer u.own.Close()
		}
		if low.own.Handle().Outcome() != abort.Aborted {
			t.Error("not evicted while the observer slept")
		}
		time.Sleep(10 * time.Second)
		if n := told.Load(); n < 2 {
			t.Errorf("told %d decisions, then it panicked", n)
		}
		low.own.Close()
	})
}

func TestConfiguration(t *testing.T) {
	ev := evictor.New()
	for name, f := range map[string]func(){
		"nil Evictor":  func() { flowcontrol.NewPool(nil) },
		"nil Option":   func() { flowcontrol.NewPool(ev, nil) },
		"nil observer": func() { flowcontrol.WithObserver(nil) },
		"ceiling":      func() { flowcontrol.WithCeilings(1.1, .5) },
		"NaN ceiling":  func() { flowcontrol.WithCeilings(nan(), nan()) },
		"steps":        func() { flowcontrol.WithSteps(0, 1) },
		"waiting":      func() { flowcontrol.WithMaxWaiting(0) },
		"no name":      func() { flowcontrol.NewPool(ev).SetEndpoint(flowcontrol.Endpoint{}) },
	} {
		func() {
			defer func() {
				if p := fmt.Sprint(recover()); !strings.HasPrefix(p, "flowcontrol: ") {
					t.Errorf("%s: panic %q", name, p)
				}
			}()
			f()
		}()
	}
}

func nan() float64 { z := 0.0; return z / z }

// TestUnseenBodies admits sheddable requests one after the other, of which nobody sees more than
// that response headers came, to an endpoint where prefills take less than 100 ms. Guesses at
// first tokens must not hold up those behind them, nor be taken for measurements.
func TestUnseenBodies(t *testing.T) {
	for _, c := range []struct {
		name   string
		unseen bool // the Owner says so; else it may be an answer that is not streamed
		within time.Duration
	}{{"response_body_mode NONE", true, 600 * time.Millisecond}, {"not streamed", false, 1500 * time.Millisecond}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(evictor.New())
				w.SetEndpoint(flowcontrol.Endpoint{Name: "a", Capacity: 1_000_000})
				speed := func() float64 { return w.Status().Endpoints[0].Speed }
				before, start := speed(), time.Now()
				for range 5 {
					s := newStream(t)
					defer s.own.Close()
					if c.unseen {
						s.own.Unseen()
					}
					if _, err := w.Admit(s.ctx, flowcontrol.Request{Priority: -1, Tokens: 1500}); err != nil {
						t.Fatal(err)
					}
					s.own.Advance(abort.Streaming)
					for range 20 {
						time.Sleep(5 * time.Millisecond)
						w.Observe("a", flowcontrol.Sample{Used: 1500, At: time.Now()})
					}
				}
				took := time.Since(start)
				for range 400 {
					time.Sleep(50 * time.Millisecond)
					w.Observe("a", flowcontrol.Sample{Used: 7500, At: time.Now()})
				}
				if after := speed(); after != before {
					t.Errorf("guesses have changed the speed from %.1f to %.1f tokens per ms", before, after)
				}
				if took > c.within {
					t.Errorf("five requests took %v to start", took)
				}
				if e := w.Status().Endpoints[0]; e.Backlog != 0 || e.Occupied < 5*2000 {
					t.Errorf("after 20 s: %+v, want no backlog, and more tokens than prompts have", e)
				}
			})
		})
	}
}

// TestSlowEnd has a victim's stream end late, as on a machine that stalls: nobody else is
// evicted in its stead.
func TestSlowEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(evictor.New(), flowcontrol.WithEvictionBelow(0))
		w.SetEndpoint(flowcontrol.Endpoint{Name: "a", Capacity: 100_000, Slots: 2})
		w.sample(t, w.tracked, "a")
		var low []*stream
		for range 2 {
			s := newStreamThatEnds(t, 60*time.Millisecond)
			if _, err := w.Admit(s.ctx, flowcontrol.Request{Priority: -1, Tokens: 100}); err != nil {
				t.Fatal(err)
			}
			low = append(low, s)
		}
		time.Sleep(time.Second)
		u := newStream(t)
		if _, err := w.Admit(u.ctx, flowcontrol.Request{Priority: 1, Tokens: 100}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		if n := aborted(low); n != 1 {
			t.Errorf("%d were evicted, want 1", n)
		}
		u.own.Close()
		for _, s := range low {
			s.own.Close()
		}
	})
}
