package main

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/extevict/extevict/internal/policy"
)

// S1 is not about engines: a scheduler hands out unit leases, 20 of which are in use, and may not have
// more than 18 when it admits; then urgent requests come. What was evicted frees its lease when its
// stream has ended, after 3 ms. An urgent request holds its own for 1 ms: with 18 leases, 32 of them
// could not pass otherwise before somebody ends.
const (
	unitLeases  = 20
	unitCeiling = 18
	unitEnd     = 3 * time.Millisecond
	unitHold    = time.Millisecond
	unitSample  = 50 * time.Millisecond
	unitTokens  = 640 // a lease, to the core: far more than the 64 that it reserves for an urgent request's first tokens
	unitLimit   = 10 * time.Second
)

const (
	wait95 = "wait p95 ms"
	relief = "first relief ms"
	killed = "evicted"
)

// bench is the leases in use over time, and the urgent requests that wait.
type bench struct {
	now   time.Duration
	inUse int
	past  []int // in use at each millisecond
	later map[time.Duration][]func()

	offered time.Duration
	waits   []time.Duration
	evicted int
}

func (b *bench) in(d time.Duration, do func()) { b.later[b.now+d] = append(b.later[b.now+d], do) }

func (b *bench) lagging(lag time.Duration) int {
	i := len(b.past) - 1 - int(lag/time.Millisecond)
	if lag == 0 {
		return b.inUse
	}
	return b.past[max(i, 0)]
}

// admitted books that an urgent request has its lease.
func (b *bench) admitted(over func()) {
	b.waits = append(b.waits, b.now-b.offered)
	b.inUse++
	b.in(unitHold, func() {
		b.inUse--
		over()
	})
}

// unitScheduler hands out the leases of a bench.
type unitScheduler interface {
	urgent(n int) // come
	sample(used int, at, now time.Duration)
	tick()
}

// units runs one scheduler: urgent requests come after about 2 s, seed says when exactly.
func runUnits(seed uint64, urgent int, lag time.Duration, make func(*bench) unitScheduler) numbers {
	b := &bench{inUse: unitLeases, later: map[time.Duration][]func(){}, offered: 2*time.Second + time.Duration(seed*7)*time.Millisecond}
	s := make(b)
	for b.now = 0; b.now < b.offered+unitLimit; b.now += time.Millisecond {
		for _, do := range b.later[b.now] {
			do()
		}
		delete(b.later, b.now)
		b.past = append(b.past, b.inUse)
		if b.now > 0 && b.now%unitSample == 0 {
			used, at := b.inUse, b.now
			if lag == 0 {
				s.sample(used, at, at)
			} else {
				b.in(lag, func() { s.sample(used, at, b.now) })
			}
		}
		if b.now == b.offered {
			s.urgent(urgent)
		}
		s.tick()
	}
	for len(b.waits) < urgent {
		b.waits = append(b.waits, unitLimit) // never
	}
	slices.Sort(b.waits)
	ms := func(d time.Duration) float64 { return float64(d) / 1e6 }
	return numbers{wait95: ms(b.waits[int(math.Ceil(0.95*float64(urgent)))-1]), relief: ms(b.waits[0]), killed: float64(b.evicted)}
}

// unitCore is the core of package flowcontrol before unit leases.
type unitCore struct {
	*bench
	core *policy.Core
}

func newUnitCore(b *bench) unitScheduler {
	c := policy.Config{
		Evict: true, Block: 1,
		// 18 of 20 leases, and the reserve.
		Ceiling: (unitCeiling + 0.12) / unitLeases,
		// There is no queue behind a lease where an urgent request could wait for its victims.
		Without: policy.Optimistic,
	}
	u := &unitCore{b, policy.New(c)}
	u.core.SetEndpoint(0, policy.Endpoint{Name: "leases", Capacity: 2 * unitLeases * unitTokens})
	u.inUse = 0
	for range unitLeases {
		u.core.Offer(0, &policy.Request{Priority: -1, Prompt: unitTokens - 1})
		u.tick()
	}
	if u.inUse != unitLeases {
		panic("scenes: leases not handed out")
	}
	u.core.SetEndpoint(0, policy.Endpoint{Name: "leases", Capacity: unitLeases * unitTokens})
	return u
}

func (u *unitCore) urgent(n int) {
	for range n {
		u.core.Offer(u.now, &policy.Request{Prompt: unitTokens - 1})
		u.tick()
	}
}

func (u *unitCore) sample(used int, at, now time.Duration) {
	u.core.Sample(now, "leases", policy.Sample{Used: int64(used) * unitTokens, At: at})
}

func (u *unitCore) tick() {
	st := u.core.Step(u.now)
	for _, d := range st.Decisions {
		for _, v := range d.Victims {
			u.evicted++
			u.in(unitEnd, func() {
				u.inUse--
				u.core.Ended(u.now, v.Request)
				u.core.Finish(u.now, v.Request, false) // a lease whose stream has ended is free
				u.tick()
			})
		}
	}
	for _, r := range st.Dispatch {
		u.core.Count(u.now, r, true, 0)
		if r.Priority < 0 {
			u.inUse++
			continue
		}
		u.admitted(func() {
			u.core.Finish(u.now, r, true)
			u.tick()
		})
	}
}

// unitGauge is the controller that evicts by a gauge: what the ceiling says is too much, at most 2 at a time.
type unitGauge struct {
	*bench
	lag, grace time.Duration
	waiting    int
	out        int
	until      time.Duration
	sheddable  int
}

func (g *unitGauge) urgent(n int)                             { g.waiting = n }
func (g *unitGauge) sample(int, time.Duration, time.Duration) {}

func (g *unitGauge) tick() {
	for g.waiting > 0 {
		used := g.lagging(g.lag)
		if used >= unitCeiling {
			if g.out == 0 && g.now >= g.until {
				for range min(max(1, used-unitCeiling), 2, g.sheddable) {
					g.sheddable--
					g.evicted++
					g.out++
					g.in(unitEnd, func() {
						g.out--
						g.inUse--
						g.until = g.now + g.grace
					})
				}
			}
			return
		}
		g.waiting--
		g.admitted(func() {})
		if g.lag > 0 {
			return // the gauge hasn't moved
		}
	}
}

// units is S1.
func units() scene {
	s := scene{
		name: "S1", what: "20 unit leases in use, ceiling 0.9, streams end in 3 ms: urgent requests come, and hold their leases for 1 ms",
		columns: []string{wait95, relief, killed},
	}
	lags := []time.Duration{0, 50 * time.Millisecond, 200 * time.Millisecond}
	name := func(who string, n int, lag time.Duration) string {
		return fmt.Sprintf("%s, %d urgent, lag %v", who, n, lag)
	}
	for _, n := range []int{32, 1} {
		for _, lag := range lags {
			s.variants = append(s.variants, variant{name(ours, n, lag), func(seed uint64) numbers { return runUnits(seed, n, lag, newUnitCore) }})
			for _, grace := range []time.Duration{5, 50, 200} {
				grace *= time.Millisecond
				s.variants = append(s.variants, variant{name(fmt.Sprint("gauge, grace ", grace), n, lag), func(seed uint64) numbers {
					return runUnits(seed, n, lag, func(b *bench) unitScheduler {
						return &unitGauge{bench: b, lag: lag, grace: grace, sheddable: unitLeases}
					})
				}})
			}
		}
	}
	s.targets = func(r results) (ts []target) {
		for _, lag := range lags {
			v, must := name(ours, 32, lag), 8.0
			if lag > 0 {
				must = 10
			}
			ts = append(ts, atMost(r, v, wait95, must, 4, " ms"))
			if lag == 0 {
				ts = append(ts, atMost(r, v, relief, 5, 4, " ms"))
			}
		}
		for _, lag := range lags {
			v := name(ours, 1, lag)
			t := atMost(r, v, killed, unitLeases-unitCeiling+1, no, "")
			t.must = "exactly 3"
			t.missed = slices.ContainsFunc(r[v], func(n numbers) bool { return n[killed] != unitLeases-unitCeiling+1 })
			ts = append(ts, t)
		}
		return ts
	}
	return s
}
