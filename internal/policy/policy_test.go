package policy_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/extevict/extevict/internal/policy"
)

const period = 50 * time.Millisecond // of samples

// world is a Core and a clock.
type world struct {
	*policy.Core
	t      *testing.T
	now    time.Duration
	leaked int64 // tokens that the engine does not free
}

// newWorld returns one with endpoint a of 10,000 tokens, of which samples tell.
func newWorld(t *testing.T, c policy.Config) *world {
	c.Sheddable = 1
	w := &world{Core: policy.New(c), t: t, now: time.Second}
	w.SetEndpoint(w.now, policy.Endpoint{Name: "a", Capacity: 10_000})
	w.sample(0)
	return w
}

func (w *world) sample(used int64) bool {
	return w.Sample(w.now, "a", policy.Sample{Used: used, At: w.now})
}

// used is what a perfect gauge of a would say if all prefills were done.
func (w *world) used() int64 {
	l := w.Ledger("a")
	return l.ActiveTokens + l.ReclaimTokens + w.leaked
}

func (w *world) offer(priority int, prompt int64) *policy.Request {
	r := &policy.Request{Priority: priority, Prompt: prompt}
	w.Offer(w.now, r)
	return r
}

func (w *world) step() policy.Step {
	w.t.Helper()
	s := w.Step(w.now)
	if err := w.Check(w.now); err != nil {
		w.t.Fatal(err)
	}
	return s
}

// pass lets time pass, with samples of what use returns.
func (w *world) pass(d time.Duration, use func() int64) {
	w.t.Helper()
	for end := w.now + d; w.now < end; {
		w.now += period
		w.sample(use())
		w.step()
	}
}

// run starts n requests and has their first tokens seen.
func (w *world) run(n, priority int, prompt int64) (rs []*policy.Request) {
	w.t.Helper()
	for range n {
		r := w.offer(priority, prompt)
		w.step()
		if r.State() != policy.Active {
			w.t.Fatalf("not started: %v", slices.Collect(w.status()))
		}
		w.now += time.Duration(prompt/25) * time.Millisecond
		w.Count(w.now, r, true, 1)
		rs = append(rs, r)
	}
	w.now += period
	w.sample(w.used())
	w.step()
	return rs
}

func (w *world) status() func(yield func(policy.Status) bool) {
	return func(yield func(policy.Status) bool) { w.Status(w.now, func(s policy.Status) { yield(s) }) }
}

// whys is what the decisions of a step were.
func whys(s policy.Step) (ws []policy.Why) {
	for _, d := range s.Decisions {
		ws = append(ws, d.Why)
	}
	return ws
}

func victims(s policy.Step) (rs []*policy.Request) {
	for _, d := range s.Decisions {
		for _, v := range d.Victims {
			rs = append(rs, v.Request)
		}
	}
	return rs
}

func (w *world) want(s policy.Step, why ...policy.Why) {
	w.t.Helper()
	if diff := cmp.Diff(why, whys(s)); diff != "" {
		w.t.Fatalf("decisions (-want +got):\n%s", diff)
	}
}

func (w *world) state(r *policy.Request, want policy.State) {
	w.t.Helper()
	if r.State() != want {
		w.t.Fatalf("request is in state %d, want %d", r.State(), want)
	}
}

// ended has the streams of victims end.
func (w *world) ended(rs ...*policy.Request) {
	for _, r := range rs {
		w.Ended(w.now, r)
	}
}

func TestCover(t *testing.T) {
	for name, tt := range map[string]struct {
		items  []policy.Item
		tokens float64
		slots  int
		want   []policy.Item // nil: it can't be done
	}{
		"none":                      {tokens: 1},
		"cheapest per token":        {[]policy.Item{{100, 10, 0}, {100, 20, 0}}, 100, 1, []policy.Item{{100, 10, 0}}},
		"what is redundant":         {[]policy.Item{{10, 1, 0}, {100, 20, 0}}, 100, 0, []policy.Item{{100, 20, 0}}},
		"one larger":                {[]policy.Item{{50, 10, 0}, {50, 11, 0}, {500, 15, 0}, {120, 120, 0}}, 100, 0, []policy.Item{{500, 15, 0}}},
		"one instead of two":        {[]policy.Item{{60, 6, 0}, {60, 60, 0}, {100, 50, 0}}, 110, 0, []policy.Item{{60, 6, 0}, {100, 50, 0}}},
		"low priority first":        {[]policy.Item{{100, 900, 0}, {100, 1, 1}}, 100, 0, []policy.Item{{100, 900, 0}}},
		"higher if it must":         {[]policy.Item{{50, 900, 0}, {100, 1, 1}}, 150, 0, []policy.Item{{50, 900, 0}, {100, 1, 1}}},
		"never equal":               {[]policy.Item{{50, 900, 0}, {100, 1, 2}}, 150, 0, nil},
		"too little":                {[]policy.Item{{50, 9, 0}, {60, 1, 0}}, 150, 0, nil},
		"a slot, by cost":           {[]policy.Item{{1000, 90, 0}, {16, 5, 0}}, 0, 1, []policy.Item{{16, 5, 0}}},
		"two slots":                 {[]policy.Item{{1000, 5, 0}, {16, 5, 0}}, 10, 2, []policy.Item{{1000, 5, 0}, {16, 5, 0}}},
		"more than may end at once": {slices.Repeat([]policy.Item{{10, 1, 0}}, 10), 80, 0, nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, ok := policy.Cover(tt.items, tt.tokens, tt.slots, 7, 2)
			if !ok {
				got = nil
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("cover (-want +got):\n%s", diff)
			}
		})
	}
}

// Against all subsets: enough, nothing redundant, no higher priority than needed, mostly close to
// the minimum, and never dearer than any single request if it is several.
func TestCoverSmall(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var ratios []float64
	for range 5000 {
		items := make([]policy.Item, 1+rng.IntN(9))
		for i := range items {
			items[i] = policy.Item{Tokens: 16 * float64(1+rng.IntN(200)), Cost: 5 + float64(rng.IntN(300)), Priority: rng.IntN(2)}
		}
		need := 1 + float64(rng.IntN(4000))
		least, band := math.Inf(1), math.MaxInt
		for set := range 1 << len(items) {
			tokens, cost, highest := 0.0, 0.0, 0
			for i, it := range items {
				if set>>i&1 == 1 {
					tokens, cost, highest = tokens+it.Tokens, cost+it.Cost, max(highest, it.Priority)
				}
			}
			if tokens >= need && (highest < band || highest == band && cost < least) {
				least, band = cost, highest
			}
		}
		got, ok := policy.Cover(items, need, 0, 100, 2)
		if ok != (band < math.MaxInt) {
			t.Fatalf("%v for %v: %v", items, need, ok)
		}
		if !ok {
			continue
		}
		tokens, cost, highest := 0.0, 0.0, 0
		for _, it := range got {
			tokens, cost, highest = tokens+it.Tokens, cost+it.Cost, max(highest, it.Priority)
		}
		if tokens < need || highest > band {
			t.Fatalf("%v for %v: %v", items, need, got)
		}
		for _, it := range got {
			if tokens-it.Tokens >= need {
				t.Fatalf("%v for %v: %v, %v is redundant", items, need, got, it)
			}
		}
		for _, it := range items {
			if len(got) > 1 && it.Priority <= highest && it.Tokens >= need && it.Cost < cost {
				t.Fatalf("%v for %v: %v, %v costs less", items, need, got, it)
			}
		}
		ratios = append(ratios, cost/least)
	}
	slices.Sort(ratios)
	median, p95 := ratios[len(ratios)/2], ratios[len(ratios)*95/100]
	t.Logf("cost against the minimum: median %.2f, p95 %.2f, max %.2f", median, p95, ratios[len(ratios)-1])
	if median > 1.01 || p95 > 2 {
		t.Errorf("cost against the minimum: median %.2f, p95 %.2f", median, p95)
	}
}

func TestOptimistic(t *testing.T) {
	w := newWorld(t, policy.Config{Evict: true})
	w.run(8, 0, 1000)
	r := w.offer(1, 2000)
	s := w.step()
	w.want(s, policy.WhyKV)
	w.state(r, policy.Active)
	if len(victims(s)) != 1 {
		t.Errorf("%d victims, want 1", len(victims(s))) // 8128 + 2080 - 9700 tokens
	}
	if got := w.SheddableCeiling(); math.Abs(got-0.89*0.90) > 1e-9 {
		t.Errorf("ceiling is %v", got)
	}
}

func TestHold(t *testing.T) {
	w := newWorld(t, policy.Config{Evict: true, Without: policy.Optimistic})
	w.run(8, 0, 1000)
	r := w.offer(1, 2000)
	s := w.step()
	vs := victims(s)
	w.want(s, policy.WhyKV)
	w.state(r, policy.Waiting)
	if r.Held() != "a" {
		t.Fatalf("held on %q", r.Held())
	}
	second := w.offer(1, 500) // would fit into what comes free, but that is held
	s = w.step()
	w.want(s, policy.WhyKV)
	w.ended(append(vs, victims(s)...)...)
	w.now += 51 * time.Millisecond
	w.step()
	w.state(r, policy.Active)
	w.Leave(w.now, second)
	if l := w.Ledger("a"); l.Holds != 0 {
		t.Errorf("client has left, %d holds", l.Holds)
	}

	third := w.offer(1, 3000)
	w.step()
	if third.Held() == "" {
		t.Fatal("not held")
	}
	since := w.now
	for w.now < since+policy.HoldFor {
		w.now += period
		w.sample(w.used())
		s = w.step()
	}
	if third.Held() != "" && len(s.Decisions) == 0 {
		t.Error("held for longer than a second")
	}
}

// TestComing has a request need what clients that left will give back.
func TestComing(t *testing.T) {
	for _, without := range []policy.Part{0, policy.Optimistic} {
		w := newWorld(t, policy.Config{Evict: true, Without: without})
		rs := w.run(8, 0, 1000)
		for _, r := range rs[:3] {
			w.Leave(w.now, r)
		}
		r := w.offer(1, 3000)
		w.want(w.step(), policy.WhyComing)
		if without == 0 {
			w.state(r, policy.Active) // waits in the engine
			continue
		}
		if r.Held() != "a" {
			t.Errorf("held on %q", r.Held())
		}
		w.now += 51 * time.Millisecond
		w.want(w.step())
		w.state(r, policy.Active)
	}
}

func TestSlots(t *testing.T) {
	w := newWorld(t, policy.Config{Evict: true})
	w.SetEndpoint(w.now, policy.Endpoint{Name: "a", Capacity: 10_000, Slots: 2})
	w.run(2, 0, 100)
	w.offer(0, 100)
	w.want(w.step())
	w.offer(1, 100)
	s := w.step()
	w.want(s, policy.WhySlot)
	if len(victims(s)) != 1 {
		t.Errorf("%d victims", len(victims(s)))
	}
}

func TestRelief(t *testing.T) {
	w := newWorld(t, policy.Config{Evict: true, SheddableCeiling: 0.97})
	w.SetEndpoint(w.now, policy.Endpoint{Name: "a", Capacity: 100_000})
	shed := w.offer(0, 50_000) // 2 s
	w.step()
	w.now += period
	w.sample(1000)
	r := &policy.Request{Priority: 1, Prompt: 1000}
	w.Offer(w.now, r)
	s := w.step()
	w.want(s, policy.WhyPrefill)
	w.state(r, policy.Active)
	w.state(shed, policy.Reclaiming)

	w = newWorld(t, policy.Config{Evict: true, Without: policy.Relief})
	w.offer(0, 5000)
	w.step()
	w.offer(1, 4000)
	w.want(w.step())
}

func TestHopeless(t *testing.T) {
	w := newWorld(t, policy.Config{Evict: true})
	w.run(8, 0, 1000)
	w.Offer(w.now, &policy.Request{Priority: 1, Prompt: 2000, Target: 50 * time.Millisecond}) // a relief takes 55
	patient := w.offer(1, 2000)
	w.want(w.step(), policy.WhyHopeless, policy.WhyKV)
	w.state(patient, policy.Active) // does not wait for a request that can't be helped
	if w.SheddableCeiling() >= 0.90 {
		t.Error("the ceiling was not lowered")
	}
}

func TestDryRun(t *testing.T) {
	run := func(c policy.Config) (*world, int, *policy.Request) {
		w := newWorld(t, c)
		w.run(8, 0, 1000)
		r, n := w.offer(1, 2000), 0
		for range 20 {
			w.now += period
			w.sample(w.used())
			n += len(victims(w.step()))
		}
		return w, n, r
	}
	w, n, r := run(policy.Config{Evict: true, DryRun: true})
	if n != 1 {
		t.Errorf("reported %d victims, want 1", n)
	}
	w.state(r, policy.Waiting)
	off, _, _ := run(policy.Config{})
	if diff := cmp.Diff(off.Ledger("a"), w.Ledger("a")); diff != "" {
		t.Errorf("ledger, evictions off and dry (-off +dry):\n%s", diff)
	}
	if off.Budget() != w.Budget() || off.SheddableCeiling() != w.SheddableCeiling() {
		t.Errorf("budget and ceiling: %v %v off, %v %v dry", off.Budget(), off.SheddableCeiling(), w.Budget(), w.SheddableCeiling())
	}
}

func TestStale(t *testing.T) {
	w := newWorld(t, policy.Config{Evict: true})
	w.run(8, 0, 1000)
	w.now += 3 * time.Second
	w.offer(1, 2000)
	w.want(w.step(), policy.WhyStale)
	w.sample(w.used())
	w.want(w.step(), policy.WhyKV)
}

func TestRefused(t *testing.T) {
	w := newWorld(t, policy.Config{MaxWaiting: 3})
	w.run(7, 0, 1000)
	for _, prompt := range []int64{10_000, math.MaxInt64} {
		r := w.offer(1, prompt)
		if s := w.step(); len(s.Reject) != 1 || s.Reject[0].Why != policy.WhyInfeasible || r.State() != policy.Done {
			t.Errorf("prompt of %d: %+v", prompt, s.Reject)
		}
	}
	r := &policy.Request{Endpoints: []string{"b"}}
	w.Offer(w.now, r)
	w.step()
	w.state(r, policy.Done)
	var rs []*policy.Request
	for i := range 5 {
		rs = append(rs, w.offer(i%2, 5000))
	}
	s := w.step()
	var got []int
	for _, x := range s.Reject {
		if x.Why != policy.WhyOverloaded {
			t.Errorf("rejected: %q", x.Why)
		}
		got = append(got, slices.Index(rs, x.Request))
	}
	if diff := cmp.Diff([]int{4, 2}, got); diff != "" {
		t.Errorf("rejected, last first (-want +got):\n%s", diff)
	}
}

func TestOrder(t *testing.T) {
	w := newWorld(t, policy.Config{})
	w.SetEndpoint(w.now, policy.Endpoint{Name: "a", Capacity: 10_000, Slots: 1})
	w.run(1, 1, 100)
	var rs []*policy.Request
	for _, r := range []*policy.Request{{Priority: 0}, {Priority: 1}, {Priority: 0, Evictions: 2}, {Priority: 2}, {Priority: 1, Evictions: 1}, {Priority: 1}} {
		w.Offer(w.now, r)
		rs = append(rs, r)
	}
	var got []int
	for range rs {
		w.Active(func(r *policy.Request) bool { w.Finish(w.now, r, true); return false })
		for _, r := range w.step().Dispatch {
			got = append(got, slices.Index(rs, r))
		}
	}
	if diff := cmp.Diff([]int{3, 4, 1, 5, 2, 0}, got); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}
}

func TestBudget(t *testing.T) {
	w := newWorld(t, policy.Config{Evict: true, Without: policy.Breakers})
	w.SetEndpoint(w.now, policy.Endpoint{Name: "a", Capacity: 100_000})
	for _, r := range w.run(9, 0, 1000) {
		w.Count(w.now, r, true, 9000) // 2250 ms each; the burst is 1000
	}
	w.now += period
	w.sample(w.used())
	w.offer(1, 15_000)
	w.want(w.step(), policy.WhyBudget)
	if got := w.Budget(); got != 1000 {
		t.Errorf("budget is %v", got)
	}

	w = newWorld(t, policy.Config{Evict: true})
	w.SetEndpoint(w.now, policy.Endpoint{Name: "a", Capacity: 100_000})
	for _, r := range w.run(9, 0, 1000) {
		w.Count(w.now, r, true, 3500) // 905 ms
	}
	w.now += period
	w.sample(w.used())
	w.offer(1, 58_000)
	w.want(w.step(), policy.WhyKV)
	if got := w.Budget(); !(got >= 0 && got < 200) {
		t.Errorf("budget is %v", got)
	}
	left := w.Budget()
	w.now += time.Second
	w.offer(0, 0)
	w.step()
	if got := w.Budget() - left; math.Abs(got-50) > 1e-6 {
		t.Errorf("a second fills in %v ms, want 50", got)
	}
}

func TestAIMD(t *testing.T) {
	w := newWorld(t, policy.Config{Evict: true})
	w.run(8, 0, 1000)
	w.offer(1, 2000)
	w.step()
	w.offer(1, 1000)
	w.want(w.step(), policy.WhyKV) // at once: is not lowered again
	low := w.SheddableCeiling()
	if math.Abs(low-0.89*0.90) > 1e-9 {
		t.Fatalf("ceiling is %v", low)
	}
	w.now += 2 * time.Second
	w.offer(0, 1000)
	w.step()
	if got := w.SheddableCeiling() - low; math.Abs(got-0.02) > 1e-9 {
		t.Errorf("rose by %v in 2 s", got)
	}
	w.now += time.Hour
	w.step()
	if got := w.SheddableCeiling(); got != 0.90 {
		t.Errorf("ceiling is %v", got)
	}
}

func TestLearnedLag(t *testing.T) {
	w := newWorld(t, policy.Config{Evict: true, Without: policy.AIMD})
	for range 20 {
		w.pass(time.Second, w.used)
		for w.Ledger("a").ActiveTokens < 8000 {
			w.run(1, 0, 1000)
		}
		r := w.offer(1, 2500)
		vs := victims(w.step())
		w.Finish(w.now, r, true)
		before := w.used()
		if len(vs) == 0 {
			continue
		}
		w.now += time.Millisecond
		w.ended(vs...)
		w.pass(300*time.Millisecond, func() int64 { return before })
		w.pass(100*time.Millisecond, func() int64 { return w.Ledger("a").ActiveTokens })
	}
	if got := w.Lag(); got < 200*time.Millisecond || got > 400*time.Millisecond {
		t.Errorf("lag is %v, an engine takes 300 ms", got)
	}
}

// An engine that frees nothing loses a handful of requests, not all.
func TestBreakerNoEffect(t *testing.T) {
	for name, leaks := range map[string]bool{"leaks": true, "frees": false} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, policy.Config{Evict: true, Without: policy.Observer | policy.AIMD})
			evicted := 0
			for range 20 {
				for w.Ledger("a").ActiveTokens < 8000 {
					w.run(1, 0, 1000)
				}
				r := w.offer(1, 2000)
				vs := victims(w.step())
				evicted += len(vs)
				w.now += time.Millisecond
				w.ended(vs...)
				if leaks {
					w.leaked += 1008 * int64(len(vs))
				}
				w.Finish(w.now, r, false)
				w.pass(50*time.Millisecond, w.used)
				w.pass(1400*time.Millisecond, func() int64 { w.leaked++; return w.used() - w.Ledger("a").ReclaimTokens })
			}
			if leaks && (evicted < 3 || evicted > 4) { // it is judged when a second has passed
				t.Errorf("%d evicted in half a minute, want 3 or 4", evicted)
			} else if !leaks && evicted != 20 {
				t.Errorf("%d evicted, want 20", evicted)
			}
		})
	}
}

func TestBreakerWedges(t *testing.T) {
	w := newWorld(t, policy.Config{Evict: true})
	w.run(8, 0, 1000)
	w.offer(1, 4800) // three victims that don't end
	s := w.step()
	if len(victims(s)) < 3 {
		t.Fatalf("%d victims", len(victims(s)))
	}
	full := w.used()
	w.pass(policy.WedgedAfter+4*period, func() int64 { full++; return full }) // those evicted in their stead hang too
	st := slices.Collect(w.status())[0]
	if st.Wedged < 3 || !st.Breaker {
		t.Fatalf("%+v", st)
	}
	w.offer(1, 4000)
	w.want(w.step(), policy.WhyBreaker)
	w.pass(policy.BreakFor, func() int64 { full++; return full })
	if st := slices.Collect(w.status())[0]; st.Wedged != 0 || st.Breaker {
		t.Errorf("after 30 s: %+v", st)
	}
}

// What does not end is not counted on, even if nobody looked when it became overdue.
func TestWedgedIsNotComing(t *testing.T) {
	w := newWorld(t, policy.Config{Evict: true})
	w.run(8, 0, 1000)
	first := w.offer(1, 2500)
	w.want(w.step(), policy.WhyKV)
	w.Count(w.now, first, true, 1)
	w.now += policy.WedgedAfter + time.Millisecond
	w.sample(w.used())
	w.step()
	w.sample(w.used())
	w.offer(1, 500)
	s := w.step()
	w.want(s, policy.WhyKV)
	if len(victims(s)) != 2 { // 7056 + 1008 wedged + 2512 + 576 - 9700 tokens
		t.Errorf("%d victims, want 2", len(victims(s)))
	}
}

func TestObserver(t *testing.T) {
	for name, tt := range map[string]struct {
		sample         func(used int64) int64
		gamma, foreign float64
	}{
		"exact":                   {func(u int64) int64 { return u }, 1, 0},
		"shared prefixes":         {func(u int64) int64 { return u * 6 / 10 }, 0.6, 0},
		"foreign load":            {func(u int64) int64 { return u + 2000 }, 1, 2000},
		"restarted":               {func(u int64) int64 { return 0 }, 0.3, 0},
		"above capacity, ignored": {func(u int64) int64 { return 20_000 }, 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, policy.Config{Evict: true})
			w.run(5, 0, 1000)
			w.pass(10*time.Second, func() int64 { return tt.sample(w.used()) })
			gamma, foreign := w.Correction("a")
			if math.Abs(gamma-tt.gamma) > 0.02 || math.Abs(foreign-tt.foreign) > 20 {
				t.Errorf("gamma %v, foreign %v, want %v, %v", gamma, foreign, tt.gamma, tt.foreign)
			}
		})
	}
}

// A gauge that lags is compared with what was when it was read.
func TestObserverLag(t *testing.T) {
	w := newWorld(t, policy.Config{})
	const lag = 500 * time.Millisecond
	type reading struct {
		at   time.Duration
		used int64
	}
	var late []reading
	start := func(n int) {
		for range n {
			r := w.offer(0, 1000)
			w.step()
			w.Count(w.now, r, true, 1)
		}
	}
	for i := range 70 {
		switch i {
		case 0:
			start(2)
		case 60:
			start(1) // no sample knows of it yet
		}
		w.now += period
		w.step()
		late = append(late, reading{w.now, w.used()})
		if s := late[0]; w.now-s.at >= lag {
			w.Sample(w.now, "a", policy.Sample{Used: s.used, At: s.at})
			late = late[1:]
		}
	}
	if gamma, foreign := w.Correction("a"); gamma < 0.98 || foreign > 20 {
		t.Errorf("gamma %v, foreign %v of an exact gauge that lags by %v", gamma, foreign, lag)
	}
}

func TestObserverStuck(t *testing.T) {
	w := newWorld(t, policy.Config{Evict: true})
	rs := w.run(5, 0, 1000)
	fresh := func() bool { return slices.Collect(w.status())[0].Fresh }
	stuck := w.used()
	w.pass(time.Second, func() int64 { return stuck })
	if !fresh() {
		t.Fatal("a gauge that rightly says the same is doubtful")
	}
	for _, r := range rs[:3] {
		w.Finish(w.now, r, true)
	}
	w.pass(time.Second, func() int64 { return stuck })
	if fresh() {
		t.Fatal("a gauge that is stuck is not doubtful")
	}
	w.pass(time.Second, w.used)
	if !fresh() {
		t.Error("a gauge that moves again is doubtful")
	}
}

func TestBadSamples(t *testing.T) {
	w := newWorld(t, policy.Config{})
	for name, s := range map[string]policy.Sample{
		"negative":             {Used: -1, At: w.now},
		"future":               {Used: 1, At: w.now + 1},
		"same time":            {Used: 1, At: time.Second},
		"older":                {Used: 1, At: 0},
		"negative time":        {Used: 1, At: -1},
		"above capacity":       {Used: 15_001, At: w.now},
		"negative capacity":    {Used: 1, Capacity: -1, At: w.now},
		"above a new capacity": {Used: 1000, Capacity: 10, At: w.now},
	} {
		if name != "same time" {
			w.now += time.Millisecond
		}
		if s.At > time.Second {
			s.At += time.Hour
		}
		if w.Sample(w.now, "a", s) {
			t.Errorf("%s: good", name)
		}
	}
	if w.Sample(w.now, "b", policy.Sample{At: w.now}) {
		t.Error("unknown endpoint: good")
	}
	if got := slices.Collect(w.status())[0].Capacity; got != 10_000 {
		t.Errorf("capacity is %d", got)
	}
	if !w.sample(1) {
		t.Error("a good one: bad")
	}
}

// The client of a victim may leave while it is being evicted: an eviction that failed for that
// reason has not spared it.
func TestLeaveWhileEvicted(t *testing.T) {
	for name, leave := range map[string]bool{"left": true, "not": false} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, policy.Config{Evict: true})
			w.run(8, 0, 1000)
			w.offer(1, 2000)
			v := victims(w.step())[0]
			if leave {
				w.Leave(w.now, v)
				w.state(v, policy.Reclaiming)
			}
			w.Spared(w.now, v)
			if !leave {
				w.state(v, policy.Active)
				return
			}
			w.now += 51 * time.Millisecond
			w.step()
			w.state(v, policy.Done)
		})
	}
}

// A victim that is spared is made up for by another.
func TestMend(t *testing.T) {
	w := newWorld(t, policy.Config{Evict: true})
	w.run(8, 0, 1000)
	r := w.offer(1, 2000)
	v := victims(w.step())[0]
	w.Spared(w.now, v)
	s := w.step()
	w.want(s, policy.WhyKV)
	if d := s.Decisions[0]; d.For != r || d.Victims[0].Request == v {
		t.Errorf("%+v", d)
	}
}

func TestLegs(t *testing.T) {
	for name, on := range map[string][2]string{"two endpoints": {"a", "b"}, "one": {"a", "a"}} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, policy.Config{Evict: true})
			w.SetEndpoint(w.now, policy.Endpoint{Name: "b", Capacity: 10_000})
			legs := []*policy.Request{{Prompt: 2000, Endpoints: []string{on[0]}}, {Prompt: 2000, Endpoints: []string{on[1]}}}
			w.Join(legs[0], legs[1])
			for _, r := range legs {
				w.Offer(w.now, r)
				w.step()
				w.Count(w.now, r, true, 1)
			}
			w.now += period
			w.sample(w.used())
			w.Sample(w.now, "b", policy.Sample{Used: w.Ledger("b").ActiveTokens, At: w.now})
			w.Offer(w.now, &policy.Request{Priority: 1, Prompt: 9500, Endpoints: []string{"a"}})
			s := w.step()
			if got := victims(s); len(got) != 1 {
				t.Fatalf("%d victims", len(got))
			}
			for _, r := range legs {
				w.state(r, policy.Reclaiming)
			}
			w.Ended(w.now, victims(s)[0])
			w.now += 51 * time.Millisecond
			w.step()
			for _, r := range legs {
				w.state(r, policy.Done)
			}
		})
	}
}

// A leg on an endpoint that was removed is in no account: it runs until it is ended.
func TestLegOnRemoved(t *testing.T) {
	w := newWorld(t, policy.Config{Evict: true})
	w.SetEndpoint(w.now, policy.Endpoint{Name: "b", Capacity: 10_000})
	legs := []*policy.Request{{Prompt: 2000, Endpoints: []string{"a"}}, {Prompt: 2000, Endpoints: []string{"b"}}}
	w.Join(legs[0], legs[1])
	for _, r := range legs {
		w.Offer(w.now, r)
		w.step()
	}
	w.RemoveEndpoint(w.now, "b")
	w.now += period
	w.sample(w.used())
	w.offer(1, 9500)
	w.want(w.step(), policy.WhyKV)
	w.state(legs[0], policy.Reclaiming)
	w.state(legs[1], policy.Active)
	w.Ended(w.now, legs[0])
	w.Leave(w.now, legs[1])
	w.state(legs[1], policy.Done)
}

// What was wedged and then spared starts anew when it is evicted again.
func TestWedgedSpared(t *testing.T) {
	w := newWorld(t, policy.Config{Evict: true})
	v := w.run(1, 0, 8000)[0]
	full := w.used()
	use := func() int64 { full++; return full }
	for range 2 {
		r := w.offer(1, 5000)
		w.want(w.step(), policy.WhyKV)
		w.state(v, policy.Reclaiming)
		if st := slices.Collect(w.status())[0]; st.Wedged != 0 {
			t.Fatalf("wedged at once: %+v", st)
		}
		w.pass(policy.WedgedAfter+period, use)
		if st := slices.Collect(w.status())[0]; st.Wedged != 1 {
			t.Fatalf("not wedged: %+v", st)
		}
		w.Finish(w.now, r, false)
		w.Spared(w.now, v)
		w.state(v, policy.Active)
		w.pass(policy.HoldFor+period, use)
	}
}

// A pass ends a quarter of what it may, for however many.
func TestLimit(t *testing.T) {
	w := newWorld(t, policy.Config{Evict: true})
	w.run(20, 0, 400)
	w.now += period
	w.sample(w.used())
	for range 12 {
		w.offer(1, 600)
	}
	if n := len(victims(w.step())); n != 5 {
		t.Errorf("%d victims of 20, want 5", n)
	}
}

func TestRemoveEndpoint(t *testing.T) {
	w := newWorld(t, policy.Config{Evict: true, Without: policy.Optimistic})
	rs := w.run(8, 0, 1000)
	held := w.offer(1, 2000)
	vs := victims(w.step())
	w.RemoveEndpoint(w.now, "a")
	w.RemoveEndpoint(w.now, "a")
	w.state(vs[0], policy.Done)
	if held.Held() != "" || w.Budget() != 0 {
		t.Errorf("held on %q, budget %v", held.Held(), w.Budget())
	}
	w.SetEndpoint(w.now, policy.Endpoint{Name: "a", Capacity: 10_000})
	w.step()
	w.state(held, policy.Active)
	for _, r := range rs { // of the endpoint that was
		w.Count(w.now, r, true, 50)
		w.Ended(w.now, r)
		w.Spared(w.now, r)
		w.Leave(w.now, r)
		w.Leave(w.now, r)
		w.Finish(w.now, r, true)
		w.state(r, policy.Done)
	}
	w.Finish(w.now, held, true)
	if diff := cmp.Diff(policy.Ledger{}, w.Ledger("a")); diff != "" {
		t.Errorf("all is over (-want +got):\n%s", diff)
	}
}

func TestCapacityUnknown(t *testing.T) {
	w := newWorld(t, policy.Config{Evict: true})
	w.SetEndpoint(w.now, policy.Endpoint{Name: "b"})
	r := &policy.Request{Priority: 1, Prompt: 10, Endpoints: []string{"b"}}
	w.Offer(w.now, r)
	w.step()
	w.state(r, policy.Waiting)
	w.Sample(w.now, "b", policy.Sample{Capacity: 1000, At: w.now})
	w.step()
	w.state(r, policy.Active)
}

// Guesses are about first tokens that nobody sees: they say nothing of the engine's speed.
func TestGuess(t *testing.T) {
	w := newWorld(t, policy.Config{})
	for range 30 {
		r := w.offer(0, 2000)
		w.step()
		w.now += 80*time.Millisecond - 1
		w.Guess(w.now, r, true)
		if !r.Unanswered() {
			t.Fatal("answered before its prefill is done")
		}
		w.now += time.Second
		w.Guess(w.now, r, true)
		if r.Unanswered() || r.Generated() != 53 {
			t.Fatalf("unanswered: %v, generated %d", r.Unanswered(), r.Generated())
		}
		w.Finish(w.now, r, true)
	}
	if got := slices.Collect(w.status())[0].Speed; got != 25 {
		t.Errorf("speed is %v", got)
	}
}

func TestSpeed(t *testing.T) {
	w := newWorld(t, policy.Config{})
	for range 100 {
		r := w.offer(0, 2000)
		w.step()
		w.now += 200 * time.Millisecond
		w.Count(w.now, r, true, 1)
		w.Finish(w.now, r, true)
	}
	if got := slices.Collect(w.status())[0].Speed; math.Abs(got-10) > 0.5 {
		t.Errorf("speed is %v, want 10", got)
	}
}

func TestHugeTokens(t *testing.T) {
	w := newWorld(t, policy.Config{Evict: true})
	for _, r := range w.run(8, 0, 1000) {
		w.Count(w.now, r, true, math.MaxInt64)
		w.Count(w.now, r, false, math.MinInt64)
	}
	if got := slices.Collect(w.status())[0].Occupied; got < 10_000 {
		t.Errorf("occupied: %d", got)
	}
	w.offer(1, math.MinInt64)
	w.step()
}

func TestConfig(t *testing.T) {
	for name, c := range map[string]policy.Config{
		"Ceiling": {Ceiling: 1.1}, "NaN": {Ceiling: math.NaN()}, "SheddableCeiling": {SheddableCeiling: -1},
		"Block": {Block: -1}, "Chunk": {Chunk: -1}, "MaxWaiting": {MaxWaiting: -1},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			policy.New(c)
		}()
	}
}

// TestConstantGauge has a gauge say the same all the time because nothing changes.
func TestConstantGauge(t *testing.T) {
	c := policy.New(policy.Config{})
	c.SetEndpoint(0, policy.Endpoint{Name: "a", Capacity: 10_000})
	c.Step(0)
	r := &policy.Request{Prompt: 4000}
	c.Offer(0, r)
	c.Step(0)
	c.Count(0, r, true, 1)
	for at := time.Duration(0); at < 2*time.Second; at += 50 * time.Millisecond {
		now := at + 50*time.Millisecond // its lag
		good := c.Sample(now, "a", policy.Sample{Used: 4016, At: at})
		c.Step(now)
		if !good {
			t.Fatalf("the sample of %v is doubted", at)
		}
	}
}

// TestLateBinding has urgent requests come at once, to two engines that are far from full: those
// that would only queue there wait, and go where first tokens come first.
func TestLateBinding(t *testing.T) {
	for _, without := range []policy.Part{0, policy.LateBinding} {
		w := newWorld(t, policy.Config{Evict: true, Without: without})
		for _, name := range []string{"a", "b"} {
			w.SetEndpoint(w.now, policy.Endpoint{Name: name, Capacity: 1_000_000})
		}
		var rs []*policy.Request
		for range 8 {
			rs = append(rs, w.offer(1, 4000))
		}
		if n := len(w.step().Dispatch); without != 0 {
			if n != len(rs) {
				t.Errorf("%d were dispatched without it", n)
			}
			continue
		} else if n != 6 { // three to each: two leave less than 8192 tokens before the third
			t.Fatalf("%d were dispatched", n)
		}
		w.now += 10 * time.Millisecond
		for _, r := range rs[:6] {
			if r.Endpoint() == "b" { // is quicker than it was thought
				w.Count(w.now, r, true, 1)
			}
		}
		s := w.step()
		if len(s.Dispatch) != 2 || s.Dispatch[0] != rs[6] || s.Dispatch[0].Endpoint() != "b" || s.Dispatch[1].Endpoint() != "b" {
			t.Errorf("then %d were dispatched, of 2, where first tokens had come", len(s.Dispatch))
		}
		for _, r := range rs {
			w.Finish(w.now, r, false)
		}

		// What only sheddable work stands before is sent at once: that can be recalled.
		for _, name := range []string{"a", "b"} {
			w.Offer(w.now, &policy.Request{Prompt: 50_000, Endpoints: []string{name}})
		}
		if n := len(w.step().Dispatch); n != 2 {
			t.Fatalf("%d sheddable ones were dispatched", n)
		}
		w.offer(1, 1000)
		if n := len(w.step().Dispatch); n != 1 {
			t.Error("waits behind sheddable work")
		}
	}
}
