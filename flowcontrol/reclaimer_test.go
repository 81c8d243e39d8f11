package flowcontrol_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/flowcontrol"
)

var histories = flag.Int("histories", 2000, "random histories of TestReclaimerHistories")

// leases is an engine of 20 places whose gauge lags, behind a scheduler with a queue.
type leases struct {
	t   *testing.T
	ev  *evictor.Evictor
	lag time.Duration

	mu      sync.Mutex // guards what follows
	open    int
	history []change
	killed  int
}

type change struct {
	at   time.Time
	open int
}

const places = 20

func newLeases(t *testing.T, lag time.Duration, opts ...evictor.Option) *leases {
	return &leases{t: t, ev: evictor.New(opts...), lag: lag}
}

func (l *leases) add(n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open += n
	l.history = append(l.history, change{time.Now(), l.open})
}

// gauge is what was true a lag ago.
func (l *leases) gauge() (saturation float64, sampled time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	sampled = time.Now().Add(-l.lag)
	open := 0
	for _, c := range l.history {
		if !c.at.After(sampled) {
			open = c.open
		}
	}
	return float64(open) / places, sampled
}

// start starts a request; if it is aborted, its stream ends and its place comes free so long
// after, if not negative.
func (l *leases) start(r abort.Request, end, free time.Duration) *abort.Owner {
	own, ctx := abort.New(l.t.Context())
	l.add(1)
	l.ev.TrackRequests(ctx, r)
	own.Handle().OnSettle(func(o abort.Outcome) {
		if o != abort.Aborted {
			l.add(-1)
			return
		}
		l.mu.Lock()
		l.killed++
		l.mu.Unlock()
		if free >= 0 {
			time.AfterFunc(free, func() { l.add(-1) })
		}
		if end >= 0 {
			time.AfterFunc(end, own.Close)
		}
	})
	return own
}

// fill takes all places with sheddable requests and waits until the gauge shows it.
func (l *leases) fill() {
	for range places {
		l.start(abort.Request{Priority: -1}, confirm, confirm)
	}
	time.Sleep(l.lag + time.Second)
}

func (l *leases) kills() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.killed
}

func waiting(n, priority int) (ws []flowcontrol.Waiting) {
	for range n {
		ws = append(ws, flowcontrol.Waiting{Priority: priority})
	}
	return ws
}

func (l *leases) pressure(ws []flowcontrol.Waiting) flowcontrol.Pressure {
	p := flowcontrol.Pressure{Ceiling: 0.9, Waiting: ws}
	p.Saturation, p.Sampled = l.gauge()
	return p
}

// serve has n urgent requests wait at once and returns how long each did; they hold their
// places for a millisecond. gate says what the gauge says, blocked is called in each
// millisecond in which some wait. It gives up after 10 s.
func (l *leases) serve(n int, gate func(flowcontrol.Pressure) float64, blocked func(flowcontrol.Pressure)) (waits []time.Duration) {
	begun := time.Now()
	for time.Since(begun) < 10*time.Second {
		for len(waits) < n {
			if p := l.pressure(waiting(n-len(waits), 1)); gate(p) >= p.Ceiling {
				blocked(p)
				break
			}
			own := l.start(abort.Request{Priority: 1}, 0, 0)
			waits = append(waits, time.Since(begun))
			time.AfterFunc(time.Millisecond, func() {
				own.Settle(abort.Completed)
				own.Close()
			})
		}
		if len(waits) == n {
			break
		}
		time.Sleep(time.Millisecond)
	}
	return waits
}

func believe(p flowcontrol.Pressure) float64 { return p.Saturation }

func p95(ds []time.Duration, n int) time.Duration {
	if i := (n*95 + 99) / 100; len(ds) >= i {
		return ds[i-1]
	}
	return 10 * time.Second // never, as it were
}

// reclaim returns a function that calls Reclaim and fails the test on errors.
func reclaim(t *testing.T, r *flowcontrol.Reclaimer) func(flowcontrol.Pressure) {
	return func(p flowcontrol.Pressure) {
		if _, err := r.Reclaim(t.Context(), p); err != nil {
			t.Error(err)
		}
	}
}

// TestReclaimerBurst has 32 urgent requests come at once, and compares with what a controller
// does that ends two, waits for a while and looks again.
func TestReclaimerBurst(t *testing.T) {
	for _, c := range []struct {
		lag, p95, first time.Duration
	}{
		{0, 8 * time.Millisecond, 5 * time.Millisecond},
		{200 * time.Millisecond, 10 * time.Millisecond, 10 * time.Millisecond},
	} {
		t.Run(c.lag.String(), func(t *testing.T) {
			var ours time.Duration
			synctest.Test(t, func(t *testing.T) {
				l := newLeases(t, c.lag)
				l.fill()
				r := flowcontrol.NewReclaimer(l.ev, flowcontrol.WithEvictionBelow(0))
				gate := believe
				if c.lag > 0 {
					gate = r.Estimate
				}
				waits := l.serve(32, gate, reclaim(t, r))
				ours = p95(waits, 32)
				if len(waits) != 32 || ours > c.p95 || waits[0] > c.first {
					t.Errorf("waits %v, want p95 <= %v and first <= %v", waits, c.p95, c.first)
				}
				t.Logf("first %v, p95 %v, %d evicted", waits[0], ours, l.kills())
			})
			for _, grace := range []time.Duration{5, 50, 200} {
				grace *= time.Millisecond
				synctest.Test(t, func(t *testing.T) {
					l := newLeases(t, c.lag)
					l.fill()
					var last time.Time
					waits := l.serve(32, believe, func(flowcontrol.Pressure) {
						if time.Since(last) >= grace {
							last = time.Now()
							if _, err := l.ev.Evict(t.Context(), evictor.Demand{N: 2, Below: 0}); err != nil {
								t.Error(err)
							}
						}
					})
					theirs := p95(waits, 32)
					if theirs <= ours {
						t.Errorf("grace %v: p95 is %v, ours %v", grace, theirs, ours)
					}
					t.Logf("two each grace of %v: %d served, p95 %v, %d evicted: %.0fx ours", grace, len(waits), theirs, l.kills(), float64(theirs)/float64(ours))
				})
			}
		})
	}
}

// TestReclaimerOne has some urgent requests wait at once under every lag. As many are ended as
// dispatch below the ceiling needs.
func TestReclaimerOne(t *testing.T) {
	for lag := time.Duration(0); lag <= 200*time.Millisecond; lag += 5 * time.Millisecond {
		for _, estimates := range []bool{false, true} {
			for _, n := range []int{1, 2, 7} {
				synctest.Test(t, func(t *testing.T) {
					l := newLeases(t, lag)
					l.fill()
					r := flowcontrol.NewReclaimer(l.ev, flowcontrol.WithEvictionBelow(0))
					gate := believe
					if estimates {
						gate = r.Estimate
					}
					waits := l.serve(n, gate, reclaim(t, r))
					if want := n + 2; l.kills() != want || len(waits) != n {
						t.Errorf("lag %v, estimates %v: %d evicted for %d, want %d; waits %v", lag, estimates, l.kills(), n, want, waits)
					}
					time.Sleep(2 * time.Second)
					if d, err := r.Reclaim(t.Context(), l.pressure(waiting(1, 1))); d.Why != "" || err != nil {
						t.Errorf("with room: %v, %v", d, err)
					}
				})
			}
		}
	}
}

// TestReclaimerEstimate dispatches requests whose streams are old, on a gauge that does not show
// them yet.
func TestReclaimerEstimate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLeases(t, 200*time.Millisecond)
		for range 15 {
			l.start(abort.Request{Priority: -1}, confirm, confirm)
		}
		var ctxs []context.Context
		for range 10 {
			_, ctx := abort.New(t.Context())
			ctxs = append(ctxs, ctx)
		}
		time.Sleep(time.Second)
		r := flowcontrol.NewReclaimer(l.ev, flowcontrol.WithEvictionBelow(0))
		n := 0
		for n < len(ctxs) {
			p := l.pressure(waiting(1, 1))
			if r.Estimate(p) >= p.Ceiling {
				break
			}
			l.add(1)
			l.ev.TrackRequests(ctxs[n], abort.Request{Priority: 1})
			n++
		}
		if n != 3 {
			t.Errorf("%d dispatched, want 3", n)
		}
	})
}

// TestReclaimerFaults has evictions come to little or nothing.
func TestReclaimerFaults(t *testing.T) {
	for _, c := range []struct {
		name      string
		end, free func(i int) time.Duration
		served    int
		within    time.Duration
		killed    int
		whys      []string
	}{
		{"some hang", func(i int) time.Duration { return []time.Duration{-1, confirm}[min(places-1-i, 1)] }, nil, 1, 300 * time.Millisecond, 4,
			[]string{"slot 3", "coming 0", "slot 1", "coming 0"}},
		{"streams hang, places come free", func(int) time.Duration { return -1 }, func(int) time.Duration { return confirm }, 1, 5 * time.Millisecond, 3, []string{"slot 3", "coming 0"}},
		{"late engine", func(int) time.Duration { return confirm }, func(int) time.Duration { return 800 * time.Millisecond }, 1, 810 * time.Millisecond, 3,
			[]string{"slot 3", "coming 0"}},
		{"leaky engine", func(int) time.Duration { return confirm }, func(int) time.Duration { return -1 }, 0, 0, 7,
			[]string{"slot 3", "coming 0", "slot 2", "coming 0", "slot 2", "coming 0", "breaker 0"}},
		{"all hang", func(int) time.Duration { return -1 }, nil, 0, 0, 9,
			[]string{"slot 3", "coming 0", "slot 3", "coming 0", "slot 3", "coming 0", "breaker 0"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLeases(t, 0)
				if c.free == nil {
					c.free = c.end
				}
				for i := range places {
					l.start(abort.Request{Priority: -1}, c.end(i), c.free(i))
				}
				time.Sleep(time.Second)
				var whys []string
				r := flowcontrol.NewReclaimer(l.ev, flowcontrol.WithEvictionBelow(0), flowcontrol.WithObserver(func(d flowcontrol.Decision) {
					whys = append(whys, fmt.Sprintf("%s %d", d.Why, len(d.Victims)))
				}))
				waits := l.serve(1, believe, reclaim(t, r))
				if len(waits) != c.served || c.served > 0 && waits[0] > c.within || l.kills() != c.killed {
					t.Errorf("waits %v, %d evicted, want %d served within %v and %d evicted", waits, l.kills(), c.served, c.within, c.killed)
				}
				if d := cmp.Diff(c.whys, whys); d != "" {
					t.Errorf("decisions (-want +got):\n%s", d)
				}
			})
		})
	}
}

// TestReclaimerRefuses has nothing evicted on doubtful evidence or for nobody.
func TestReclaimerRefuses(t *testing.T) {
	gone, cancel := context.WithCancelCause(t.Context())
	left := errors.New("left")
	cancel(left)
	ago := func(d time.Duration) func(*flowcontrol.Pressure) {
		return func(p *flowcontrol.Pressure) { p.Sampled = p.Sampled.Add(-d) }
	}
	saturated := func(f float64) func(*flowcontrol.Pressure) {
		return func(p *flowcontrol.Pressure) { p.Saturation = f }
	}
	ceiling := func(f float64) func(*flowcontrol.Pressure) {
		return func(p *flowcontrol.Pressure) { p.Ceiling = f }
	}
	evict := flowcontrol.WithEvictionBelow(0)
	for _, c := range []struct {
		name string
		ctx  context.Context
		opts []flowcontrol.Option
		edit func(*flowcontrol.Pressure)
		why  flowcontrol.Why
	}{
		{"evicts", nil, []flowcontrol.Option{evict}, ago(0), flowcontrol.Slot},
		{"a sample almost old", nil, []flowcontrol.Option{evict}, ago(time.Second), flowcontrol.Slot},
		{"no option", nil, nil, ago(0), flowcontrol.Disabled},
		{"dry run", nil, []flowcontrol.Option{evict, flowcontrol.WithDryRun()}, ago(0), flowcontrol.Slot},
		{"demand gone", gone, []flowcontrol.Option{evict}, ago(0), ""},
		{"nobody waits", nil, []flowcontrol.Option{evict}, func(p *flowcontrol.Pressure) { p.Waiting = nil }, ""},
		{"it waits elsewhere", nil, []flowcontrol.Option{evict}, func(p *flowcontrol.Pressure) {
			p.Endpoint, p.Waiting[0].Endpoints = "a", []string{"b"}
		}, ""},
		{"room", nil, []flowcontrol.Option{evict}, saturated(0.89), ""},
		{"not above", nil, []flowcontrol.Option{evict}, func(p *flowcontrol.Pressure) { p.Waiting[0].Priority = -1 }, flowcontrol.Nothing},
		{"stale", nil, []flowcontrol.Option{evict}, ago(1001 * time.Millisecond), flowcontrol.Stale},
		{"of the future", nil, []flowcontrol.Option{evict}, ago(-time.Millisecond), flowcontrol.Stale},
		{"no time", nil, []flowcontrol.Option{evict}, func(p *flowcontrol.Pressure) { p.Sampled = time.Time{} }, flowcontrol.Stale},
		{"NaN", nil, []flowcontrol.Option{evict}, saturated(math.NaN()), flowcontrol.Stale},
		{"+Inf", nil, []flowcontrol.Option{evict}, saturated(math.Inf(1)), flowcontrol.Stale},
		{"negative", nil, []flowcontrol.Option{evict}, saturated(-1), flowcontrol.Stale},
		{"absurd", nil, []flowcontrol.Option{evict}, saturated(1e9), flowcontrol.Stale},
		{"ceiling 0", nil, []flowcontrol.Option{evict}, ceiling(0), flowcontrol.Stale},
		{"ceiling NaN", nil, []flowcontrol.Option{evict}, ceiling(math.NaN()), flowcontrol.Stale},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLeases(t, 0)
				l.fill()
				ctx := t.Context()
				if c.ctx != nil {
					ctx = c.ctx
				}
				told := 0
				r := flowcontrol.NewReclaimer(l.ev, append(c.opts, flowcontrol.WithObserver(func(flowcontrol.Decision) { told++ }))...)
				p := l.pressure(waiting(1, 1))
				c.edit(&p)
				d, err := r.Reclaim(ctx, p)
				if d.Why != c.why || (c.ctx != nil) != errors.Is(err, left) || c.ctx == nil && err != nil {
					t.Errorf("decision %v, error %v, want %q", d, err, c.why)
				}
				evicts := c.why == flowcontrol.Slot && !d.DryRun
				if evicts != (l.kills() == 3) || !evicts && l.kills() != 0 || d.Evicts() != (c.why == flowcontrol.Slot) {
					t.Errorf("%d evicted, %d victims", l.kills(), len(d.Victims))
				}
				if want := min(1, len(c.why)); told != want {
					t.Errorf("the observer was told %d times, want %d", told, want)
				}
			})
		})
	}
}

// TestReclaimerPeriod has samples come at a period; three of them later they are stale.
func TestReclaimerPeriod(t *testing.T) {
	for _, c := range []struct {
		period, age time.Duration
		stale       bool
	}{
		{50 * time.Millisecond, 250 * time.Millisecond, false},
		{50 * time.Millisecond, 251 * time.Millisecond, true},
		{500 * time.Millisecond, 1500 * time.Millisecond, false},
		{500 * time.Millisecond, 1501 * time.Millisecond, true},
		{5 * time.Second, 1001 * time.Millisecond, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			l := newLeases(t, 0)
			l.fill()
			r := flowcontrol.NewReclaimer(l.ev, flowcontrol.WithEvictionBelow(0), flowcontrol.WithDryRun())
			p := l.pressure(waiting(1, 1))
			for range 10 {
				time.Sleep(c.period)
				p.Sampled = time.Now()
				r.Estimate(p)
			}
			time.Sleep(c.age)
			if d, _ := r.Reclaim(t.Context(), p); (d.Why == flowcontrol.Stale) != c.stale {
				t.Errorf("period %v, age %v: %v", c.period, c.age, d)
			}
		})
	}
}

// TestReclaimerChooses looks at whom one decision ends.
func TestReclaimerChooses(t *testing.T) {
	type request = abort.Request
	type wait = flowcontrol.Waiting
	for _, c := range []struct {
		name     string
		requests []request // the latest last
		p        flowcontrol.Pressure
		why      flowcontrol.Why
		need     int64
		victims  []string
	}{
		{"tokens, the latest",
			[]request{{ID: "a", Tokens: 40, Priority: -1}, {ID: "b", Tokens: 30, Priority: -1}, {ID: "c", Tokens: 30, Priority: -1}},
			flowcontrol.Pressure{Saturation: 1, Ceiling: 0.9, Waiting: []wait{{Priority: 1, Tokens: 20}}},
			flowcontrol.KV, 11, []string{"c"}},
		{"tokens of all that waits but the last",
			[]request{{ID: "a", Tokens: 40, Priority: -1}, {ID: "b", Tokens: 30, Priority: -1}, {ID: "c", Tokens: 30, Priority: -1}},
			flowcontrol.Pressure{Saturation: 1, Ceiling: 0.9, Waiting: []wait{{Priority: 1, Tokens: 20}, {Priority: 1, Tokens: 90}}},
			flowcontrol.KV, 31, []string{"a"}},
		{"more than there is: as much as can be",
			[]request{{ID: "a", Tokens: 40, Priority: -1}, {ID: "b", Tokens: 60, Priority: 1}},
			flowcontrol.Pressure{Saturation: 1, Ceiling: 0.9, Waiting: []wait{{Priority: 1, Tokens: 20}, {Priority: 1, Tokens: 20}, {Priority: 1, Tokens: 20}}},
			flowcontrol.KV, 31, []string{"a"}},
		{"one that makes the others needless",
			[]request{{ID: "a", Tokens: 60, Priority: -1}, {ID: "b", Tokens: 30, Priority: -1}, {ID: "c", Tokens: 5, Priority: -1}, {ID: "d", Tokens: 5, Priority: -1}},
			flowcontrol.Pressure{Saturation: 1, Ceiling: 0.9, Waiting: []wait{{Priority: 1, Tokens: 20}}},
			flowcontrol.KV, 11, []string{"b"}},
		{"requests if a request's tokens are unknown",
			[]request{{ID: "a", Tokens: 40, Priority: -1}, {ID: "b", Priority: -1}, {ID: "c", Tokens: 30, Priority: -1}},
			flowcontrol.Pressure{Saturation: 1, Ceiling: 0.9, Waiting: []wait{{Priority: 1, Tokens: 20}}},
			flowcontrol.Slot, 1, []string{"c"}},
		{"only the endpoint's, by their legs there",
			[]request{{ID: "a", Tokens: 50, Priority: -1, Endpoint: "x"}, {ID: "b", Tokens: 50, Priority: -1, Endpoint: "y"}, {ID: "c", Tokens: 50, Priority: -1, Endpoint: "x"}, {ID: "d", Tokens: 50, Priority: -1, Endpoint: "y"}},
			flowcontrol.Pressure{Saturation: 1, Ceiling: 0.9, Endpoint: "x", Waiting: []wait{{Priority: 1, Tokens: 20, Endpoints: []string{"x"}}}},
			flowcontrol.KV, 11, []string{"c"}},
		{"only where it may run",
			[]request{{ID: "a", Tokens: 50, Priority: -1, Endpoint: "x"}, {ID: "b", Tokens: 50, Priority: -1, Endpoint: "y"}},
			flowcontrol.Pressure{Saturation: 1, Ceiling: 0.9, Waiting: []wait{{Priority: 1, Tokens: 20, Endpoints: []string{"x", "z"}}}},
			flowcontrol.KV, 11, []string{"a"}},
		{"nobody where it may run, others wait",
			[]request{{ID: "a", Tokens: 50, Priority: -1, Endpoint: "x"}, {ID: "b", Tokens: 50, Priority: -1, Endpoint: "y"}},
			flowcontrol.Pressure{Saturation: 1, Ceiling: 0.9, Waiting: []wait{{Priority: 2, Tokens: 20, Endpoints: []string{"z"}}, {Priority: 1, Tokens: 20}}},
			flowcontrol.KV, 11, []string{"b"}},
		{"two priorities: below each",
			[]request{{ID: "a", Priority: -1}, {ID: "b", Priority: -3}, {ID: "c", Priority: -1}, {ID: "d", Priority: -3}},
			flowcontrol.Pressure{Saturation: 1, Ceiling: 1, Waiting: []wait{{Priority: -2}, {Priority: 1}, {Priority: -2}, {Priority: -2}}},
			flowcontrol.Slot, 2, []string{"d", "b"}},
		{"two priorities: the first is worth more",
			[]request{{ID: "a", Priority: -1}, {ID: "b", Priority: -1}, {ID: "c", Priority: -1}, {ID: "d", Priority: -3}},
			flowcontrol.Pressure{Saturation: 1, Ceiling: 1, Waiting: []wait{{Priority: -2}, {Priority: 1}, {Priority: 1}, {Priority: -2}}},
			flowcontrol.Slot, 2, []string{"d", "c"}},
		{"the line", []request{{ID: "a", Priority: 0}, {ID: "b", Priority: 1}},
			flowcontrol.Pressure{Saturation: 1, Ceiling: 0.9, Waiting: []wait{{Priority: 5}}}, flowcontrol.Nothing, 0, nil},
		{"evicted too often", []request{{ID: "a", Priority: -1, Evictions: 2}, {ID: "b", Priority: -1, Evictions: 3}},
			flowcontrol.Pressure{Saturation: 1, Ceiling: 0.9, Waiting: []wait{{Priority: 5}}}, flowcontrol.Slot, 1, []string{"a"}},
		{"huge and negative", []request{{ID: "a", Priority: -1, Tokens: math.MaxInt64}, {ID: "b", Priority: -1, Tokens: math.MaxInt64}},
			flowcontrol.Pressure{Saturation: 1, Ceiling: 0.9, Waiting: []wait{{Priority: 5, Tokens: math.MinInt64}, {Priority: 5, Tokens: math.MaxInt64}}}, flowcontrol.Budget, 1, nil},
		{"too dear", []request{{ID: "a", Priority: -1, Tokens: 200_000}},
			flowcontrol.Pressure{Saturation: 1, Ceiling: 0.9, Waiting: []wait{{Priority: 5, Tokens: 1}}}, flowcontrol.Budget, 20_001, nil},
		{"too dear for all, not for some", []request{{ID: "a", Priority: -1, Tokens: 60_000}, {ID: "b", Priority: -1, Tokens: 60_000}},
			flowcontrol.Pressure{Saturation: 1, Ceiling: 0.9, Waiting: []wait{{Priority: 5, Tokens: 60_000}, {Priority: 5, Tokens: 60_000}}}, flowcontrol.KV, 12_001, []string{"b"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLeases(t, 0)
				for _, q := range c.requests {
					l.start(q, confirm, confirm)
				}
				time.Sleep(time.Second)
				c.p.Sampled = time.Now()
				d, err := flowcontrol.NewReclaimer(l.ev, flowcontrol.WithEvictionBelow(0)).Reclaim(t.Context(), c.p)
				if err != nil {
					t.Error(err)
				}
				var ids []string
				for _, v := range d.Victims {
					ids = append(ids, v.Handle.Requests()[0].ID)
					if v.Handle.Err() == nil {
						t.Error("a victim runs on")
					}
				}
				if diff := cmp.Diff(c.victims, ids); diff != "" || d.Why != c.why || d.Need != c.need || l.kills() != len(ids) {
					t.Errorf("decision %v, need %d, want %s, %d; victims (-want +got):\n%s", d, d.Need, c.why, c.need, diff)
				}
			})
		})
	}
}

// TestReclaimerSpareStarted spares what has begun to stream.
func TestReclaimerSpareStarted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLeases(t, 0)
		l.fill()
		for range places {
			l.start(abort.Request{Priority: -1}, confirm, confirm).Advance(abort.Streaming)
		}
		time.Sleep(time.Second)
		r := flowcontrol.NewReclaimer(l.ev, flowcontrol.WithEvictionBelow(0), flowcontrol.WithSpareStarted())
		p := l.pressure(waiting(100, 1))
		p.Saturation = 1
		if d, _ := r.Reclaim(t.Context(), p); len(d.Victims) != places || l.kills() != places {
			t.Errorf("%d evicted: %v", l.kills(), d)
		}
	})
}

// TestReclaimerAborters has Aborters fail, hang and panic: others end instead.
func TestReclaimerAborters(t *testing.T) {
	for name, bad := range map[string]func(context.Context) error{
		"fail":  func(context.Context) error { return errors.New("no") },
		"hang":  func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
		"panic": func(context.Context) error { panic("no") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newLeases(t, 0, evictor.WithAborter(abort.AborterFunc(func(ctx context.Context, h *abort.Handle, _ abort.Reason) error {
					if h.Requests()[0].ID == "bad" {
						return bad(ctx)
					}
					return nil
				})))
				for i := range places {
					l.start(abort.Request{Priority: -1, ID: []string{"good", "bad"}[i/(places-2)]}, confirm, confirm)
				}
				time.Sleep(time.Second)
				r := flowcontrol.NewReclaimer(l.ev, flowcontrol.WithEvictionBelow(0))
				errs := 0
				waits := l.serve(1, believe, func(p flowcontrol.Pressure) {
					d, err := r.Reclaim(t.Context(), p)
					if err != nil {
						errs++
					}
					if d.Evicts() && d.Freed != int64(len(d.Victims)) {
						t.Errorf("decision %+v", d)
					}
				})
				if len(waits) != 1 || waits[0] > 260*time.Millisecond || l.kills() != 3 || errs != 1 {
					t.Errorf("waits %v, %d evicted, %d errors", waits, l.kills(), errs)
				}
			})
		})
	}
}

// TestReclaimerCalls has the observer, the Evictor's order and Aborters call back.
func TestReclaimerCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r *flowcontrol.Reclaimer
		var l *leases
		var seen []flowcontrol.Why
		again := func() {
			p := l.pressure(nil)
			r.Estimate(p)
			if d, err := r.Reclaim(t.Context(), p); d.Why != "" || err != nil {
				t.Errorf("%v, %v", d, err)
			}
		}
		l = newLeases(t, 0,
			evictor.WithOrder(func(a, b evictor.Victim) int { again(); return 0 }),
			evictor.WithAborter(abort.AborterFunc(func(context.Context, *abort.Handle, abort.Reason) error { again(); return nil })))
		r = flowcontrol.NewReclaimer(l.ev, flowcontrol.WithEvictionBelow(0), flowcontrol.WithObserver(func(d flowcontrol.Decision) {
			seen = append(seen, d.Why)
			if len(seen) == 1 {
				again()
				if _, err := r.Reclaim(t.Context(), l.pressure(waiting(1, 1))); err != nil {
					t.Error(err)
				}
			}
			panic("observer")
		}))
		l.fill()
		if d, err := r.Reclaim(t.Context(), l.pressure(waiting(1, 1))); len(d.Victims) != 3 || err != nil {
			t.Errorf("%v, %v", d, err)
		}
		if d := cmp.Diff([]flowcontrol.Why{flowcontrol.Slot, flowcontrol.Coming}, seen); d != "" {
			t.Errorf("told (-want +got):\n%s", d)
		}
	})
}

// TestReclaimerHistories has random crowds on a gauge without lag. No victim matters as much as
// all that waits, none is needless, and nobody ends if enough is coming.
func TestReclaimerHistories(t *testing.T) {
	for seed := range uint64(*histories) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 3))
			tokens := rng.IntN(2) == 0
			size := func() int64 {
				if tokens {
					return 1 + rng.Int64N(50)
				}
				return 0
			}
			ev := evictor.New()
			line := rng.IntN(4) - 1
			r := flowcontrol.NewReclaimer(ev, flowcontrol.WithEvictionBelow(line))
			used, capacity := 0.0, 0.0
			count := func(n int64) float64 { return float64(max(1, n)) }
			pending := 0.0    // of victims
			var mu sync.Mutex // guards used and pending
			book := func(u, p float64) {
				mu.Lock()
				defer mu.Unlock()
				used += u
				pending += p
			}
			start := func() {
				n := size()
				confirm := time.Duration(rng.IntN(30))*time.Millisecond + time.Microsecond // not while a decision is made
				q := abort.Request{Priority: rng.IntN(5) - 2, Tokens: n}
				own, ctx := abort.New(t.Context())
				ev.TrackRequests(ctx, q)
				book(count(n), 0)
				own.Handle().OnSettle(func(o abort.Outcome) {
					if o == abort.Aborted {
						book(0, count(n))
						time.AfterFunc(confirm, func() { book(-count(n), -count(n)); own.Close() })
						return
					}
					book(-count(n), 0)
				})
				if rng.IntN(3) == 0 {
					time.AfterFunc(time.Duration(rng.IntN(40))*time.Millisecond+time.Microsecond, own.Close)
				}
			}
			for range 1 + rng.IntN(20) {
				start()
			}
			mu.Lock()
			capacity = used
			mu.Unlock()
			time.Sleep(time.Second)
			for range 12 {
				var ws []flowcontrol.Waiting
				most := math.MinInt
				for range rng.IntN(4) {
					w := flowcontrol.Waiting{Priority: rng.IntN(6) - 2, Tokens: size()}
					most = max(most, w.Priority)
					ws = append(ws, w)
				}
				mu.Lock()
				was, coming := used, pending
				mu.Unlock()
				p := flowcontrol.Pressure{Saturation: was / capacity, Ceiling: 0.5 + rng.Float64()/2, Waiting: ws, Sampled: time.Now()}
				d, err := r.Reclaim(t.Context(), p)
				if err != nil {
					t.Fatal(err)
				}
				var freed float64
				for _, v := range d.Victims {
					freed += count(v.Tokens)
				}
				// In order of their starts, each but the last adds to what must come free.
				slices.SortStableFunc(ws, func(a, b flowcontrol.Waiting) int { return b.Priority - a.Priority })
				all := was - coming - p.Ceiling*capacity
				for i := range ws {
					if i < len(ws)-1 {
						all += count(ws[i].Tokens)
					}
				}
				for _, v := range d.Victims {
					if v.Priority >= most || v.Priority >= line {
						t.Fatalf("seed %d: a victim of priority %d below %d and %d: %v", seed, v.Priority, most, line, d)
					}
					if freed-count(v.Tokens) > all+1e-6*capacity || d.Freed-int64(count(v.Tokens)) >= d.Need {
						t.Fatalf("seed %d: needless: %v of %v", seed, d, all)
					}
				}
				if d.Evicts() && (d.Freed < d.Need || float64(d.Freed) != freed) || d.String() == "" {
					t.Fatalf("seed %d: %d of %d: %v", seed, d.Freed, d.Need, d)
				}
				if len(ws) == 0 && d.Why != "" {
					t.Fatalf("seed %d: nobody waits: %v", seed, d)
				}
				for range rng.IntN(3) {
					start()
				}
				time.Sleep(time.Duration(rng.IntN(20)) * time.Millisecond)
			}
		})
		if t.Failed() {
			return
		}
	}
}

// TestReclaimerRace has several schedulers share a Reclaimer, in real time, and looks for what
// is left.
func TestReclaimerRace(t *testing.T) {
	ev := evictor.New()
	var mu sync.Mutex
	victims := make(map[*abort.Handle]int)
	r := flowcontrol.NewReclaimer(ev, flowcontrol.WithEvictionBelow(0), flowcontrol.WithObserver(func(d flowcontrol.Decision) {
		mu.Lock()
		defer mu.Unlock()
		for _, v := range d.Victims {
			victims[v.Handle]++
		}
	}))
	before := runtime.NumGoroutine()
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for j := range 300 {
				own, ctx := abort.New(t.Context())
				ev.TrackRequests(ctx, abort.Request{Priority: -1, Endpoint: []string{"a", "b"}[j%2]})
				p := flowcontrol.Pressure{Saturation: 1, Ceiling: 0.9, Sampled: time.Now(), Waiting: waiting(1+j%3, 1), Endpoint: []string{"", "a", "b"}[(i+j)%3]}
				r.Estimate(p)
				if _, err := r.Reclaim(t.Context(), p); err != nil {
					t.Error(err)
				}
				if j%2 == 0 {
					own.Settle(abort.Completed)
				}
				own.Close()
			}
		})
	}
	wg.Wait()
	if len(victims) == 0 {
		t.Error("nobody was evicted")
	}
	for _, n := range victims {
		if n > 1 {
			t.Errorf("evicted %d times", n)
		}
	}
	for range 1000 { // the schedulers may not have quite ended
		if runtime.NumGoroutine() <= before {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if ev.Len() != 0 || runtime.NumGoroutine() > before {
		t.Errorf("%d tracked, %d goroutines, %d before", ev.Len(), runtime.NumGoroutine(), before)
	}
}
