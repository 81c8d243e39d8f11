package policy_test

import (
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/extevict/extevict/internal/policy"
)

var rounds = flag.Int("rounds", 1500, "seeds of TestRandom")

// TestRandom has random things happen to a Core, many of which make no sense, and compares it
// after each with a ledger of its own. It runs some seeds twice, for the same Steps.
func TestRandom(t *testing.T) {
	var all seen
	for seed := range uint64(*rounds) {
		a := drive(t, seed, &all)
		if seed%8 == 0 && !t.Failed() && drive(t, seed, nil) != a {
			t.Fatalf("seed %d: not deterministic", seed)
		}
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	t.Logf("%+v", all)
	if *rounds < 300 {
		return
	}
	for what, n := range map[string]int{
		"evictions": all.kv, "evictions for slots": all.slot, "recalled prefills": all.prefill, "holds": all.held, "victims spared": all.spared,
		"dry evictions": all.dry, "wedges": all.wedged, "open breakers": all.open, "rejections": all.rejected, "dispatches": all.dispatched,
		"clients that leave while held": all.heldLeft, "endpoints removed with leases": all.orphans, "evictions for a request already sent": all.mended,
		"legs that end with a victim": all.legs,
	} {
		if n == 0 {
			t.Errorf("no %s in all rounds: the test tests nothing", what)
		}
	}
}

// seen counts what happened.
type seen struct {
	kv, slot, prefill, held, spared, dry, wedged, open, rejected, dispatched, heldLeft, orphans, mended, legs int
}

// job is what the test itself knows of a request.
type job struct {
	id        int
	r         *policy.Request
	prompt    int64
	generated int64
	first     bool
	endpoints []string
	home      any // where it was dispatched to
	spared    time.Duration
	wasSpared bool
	legs      bool // it is one of several
}

func (j *job) tokens() int64 { return (j.prompt + j.generated + 1 + 15) / 16 * 16 }

type driver struct {
	t    *testing.T
	rng  *rand.Rand
	cfg  policy.Config
	core *policy.Core
	now  time.Duration
	log  io.Writer

	jobs  []*job
	homes map[string]any // the endpoint of that name, as of a dispatch to it
	slots map[string]int
	names []string
	at    map[string]time.Duration // newest good sample
	seen  *seen
}

func drive(t *testing.T, seed uint64, all *seen) uint64 {
	t.Helper()
	return driveFrom(t, rand.NewPCG(seed, 1), all)
}

func driveFrom(t *testing.T, src rand.Source, all *seen) uint64 {
	t.Helper()
	h := fnv.New64a()
	if all == nil {
		all = new(seen)
	}
	d := &driver{
		t: t, rng: rand.New(src), log: h, seen: all,
		homes: map[string]any{}, slots: map[string]int{}, at: map[string]time.Duration{},
	}
	d.cfg = policy.Config{Evict: d.chance(90), DryRun: d.chance(10), Unstarted: d.chance(10), Sheddable: 1}
	if d.chance(30) {
		d.cfg.Without = policy.Part(1 << d.rng.IntN(9))
	}
	if d.chance(10) {
		d.cfg.MaxWaiting = 5
	}
	d.core = policy.New(d.cfg)
	for range 1 + d.rng.IntN(4) {
		d.endpoint()
	}
	for range 60 + d.rng.IntN(60) {
		for range 1 + d.rng.IntN(4) {
			d.event()
		}
		if d.step(); t.Failed() {
			return 0
		}
	}
	// In the end everything ends, and nothing is left of it.
	for _, j := range d.jobs {
		d.core.Finish(d.now, j.r, true)
	}
	d.step()
	for _, n := range d.names {
		if got := d.core.Ledger(n); got != (policy.Ledger{}) {
			t.Errorf("all is over, %s has %+v", n, got)
		}
	}
	if n := d.core.Waiting(); n > 0 {
		t.Errorf("all is over, %d wait", n)
	}
	return h.Sum64()
}

func (d *driver) chance(percent int) bool { return d.rng.IntN(100) < percent }

func (d *driver) pick(states ...policy.State) *job {
	var js []*job
	for _, j := range d.jobs {
		if len(states) == 0 || slices.Contains(states, j.r.State()) {
			js = append(js, j)
		}
	}
	if len(js) == 0 {
		return nil
	}
	return js[d.rng.IntN(len(js))]
}

func (d *driver) endpoint() {
	n := string(rune('a' + d.rng.IntN(5)))
	slots := 0
	if d.chance(40) {
		slots = 1 + d.rng.IntN(6)
	}
	capacity := int64(2000 + d.rng.IntN(8000))
	if d.chance(5) {
		capacity = -capacity * int64(d.rng.IntN(2))
	}
	d.core.SetEndpoint(d.now, policy.Endpoint{Name: n, Capacity: capacity, Slots: slots})
	d.slots[n] = slots
	if !slices.Contains(d.names, n) {
		d.names = append(d.names, n)
	}
	d.sample(n)
}

func (d *driver) sample(n string) {
	s := policy.Sample{At: d.now - time.Duration(d.rng.IntN(30))*time.Millisecond}
	for _, j := range d.jobs {
		if j.r.Endpoint() == n && (j.r.State() == policy.Active || j.r.State() == policy.Reclaiming) {
			s.Used += j.tokens()
		}
	}
	switch d.rng.IntN(12) {
	case 0:
		s.Used = []int64{0, -1, math.MaxInt64, math.MinInt64, 12_000}[d.rng.IntN(5)]
	case 1:
		s.At = []time.Duration{d.now + time.Hour, -1, 0, math.MinInt64}[d.rng.IntN(4)]
	case 2:
		s.Capacity = []int64{-1, math.MaxInt64, 5000, 1}[d.rng.IntN(4)]
	case 3, 4:
		s.Used = s.Used * int64(50+d.rng.IntN(100)) / 100
	}
	good := d.core.Sample(d.now, n, s)
	at, sampled := d.at[n]
	if bad := s.Used < 0 || s.At > d.now || s.At < 0 || s.Capacity < 0 || !slices.Contains(d.names, n) || sampled && s.At <= at; good && bad {
		d.t.Errorf("at %v a sample of %s is good: %+v", d.now, n, s)
	}
	if good {
		d.at[n] = s.At
	}
}

// event has one thing happen.
func (d *driver) event() {
	c, now := d.core, d.now
	switch d.rng.IntN(20) {
	case 0, 1, 2, 3, 4:
		d.offer()
	case 5, 6, 7, 8:
		for _, n := range d.names {
			d.sample(n)
		}
	case 9, 10, 11: // progress
		for _, j := range d.jobs {
			if j.r.State() != policy.Active || d.chance(40) {
				continue
			}
			g := j.generated + int64(d.rng.IntN(80)) - 10
			if d.chance(1) {
				g = math.MinInt64
			}
			first := j.first || d.chance(50)
			if !first {
				g = 0
			}
			c.Count(now, j.r, first, g)
			j.first, j.generated = first, max(j.generated, g)
		}
	case 12:
		if j := d.pick(policy.Active); j != nil {
			c.Finish(now, j.r, d.chance(80))
			c.Finish(now, j.r, true)
		}
	case 13, 14: // victims' streams end, or don't
		for _, j := range d.jobs {
			if j.r.State() != policy.Reclaiming {
				continue
			}
			switch d.rng.IntN(8) {
			case 0, 1, 2:
				c.Ended(now, j.r)
			case 3:
				c.Spared(now, j.r)
				if j.r.State() == policy.Active {
					j.spared, j.wasSpared = now, true
					d.seen.spared++
				}
			}
		}
	case 15:
		if j := d.pick(policy.Waiting); j != nil {
			if j.r.Held() != "" {
				d.seen.heldLeft++
			}
			if d.chance(50) {
				c.Leave(now, j.r)
			} else {
				c.Finish(now, j.r, false)
			}
		}
	case 16: // any call in any state
		j := d.pick()
		if j == nil {
			return
		}
		switch d.rng.IntN(6) {
		case 0:
			c.Finish(now, j.r, d.chance(50))
		case 1:
			c.Leave(now, j.r)
		case 2:
			c.Ended(now, j.r)
		case 3:
			was := j.r.State()
			c.Spared(now, j.r)
			if was == policy.Reclaiming && j.r.State() == policy.Active {
				j.spared, j.wasSpared = now, true
			}
		case 4:
			c.Count(now, j.r, false, -5)
		case 5:
			c.Unstarted(func(*policy.Request) bool { return d.chance(90) })
			c.Active(func(*policy.Request) bool { return d.chance(90) })
			c.Delay(now)
		}
	case 17:
		if d.chance(10) {
			d.now += time.Duration(d.rng.IntN(40_000)) * time.Millisecond
		} else if d.chance(30) {
			d.now += time.Duration(d.rng.IntN(1500)) * time.Millisecond
		}
		for _, n := range d.names {
			d.sample(n)
		}
	case 18:
		if d.chance(25) {
			d.endpoint()
		}
	case 19:
		if d.chance(15) && len(d.names) > 0 {
			i := d.rng.IntN(len(d.names))
			n := d.names[i]
			if d.core.Ledger(n).Active > 0 {
				d.seen.orphans++
			}
			c.RemoveEndpoint(now, n)
			c.RemoveEndpoint(now, n)
			delete(d.homes, n)
			delete(d.at, n)
			d.names = slices.Delete(d.names, i, i+1)
		}
	}
	if d.chance(60) {
		d.now += time.Duration(d.rng.IntN(40)) * time.Millisecond
	}
}

func (d *driver) offer() {
	j := &job{id: len(d.jobs)}
	j.r = &policy.Request{Prompt: int64(d.rng.IntN(1500)), Priority: d.rng.IntN(2), Tag: j}
	if d.chance(50) {
		j.r.Priority = d.rng.IntN(5) - 2
	}
	switch d.rng.IntN(30) {
	case 0:
		j.r.Prompt = []int64{0, -1, math.MinInt64, math.MaxInt64, 9000}[d.rng.IntN(5)]
	case 1:
		j.r.Target = time.Duration(d.rng.IntN(10_000)) * time.Millisecond
	case 2:
		j.r.Fixed = true
	case 3, 4, 5:
		j.r.Endpoints = []string{string(rune('a' + d.rng.IntN(5))), string(rune('a' + d.rng.IntN(5)))}
	case 6:
		j.r.Evictions = d.rng.IntN(6) - 1
	case 7:
		j.r.Endpoints = []string{}
	}
	if first := d.pick(policy.Active); first != nil && d.chance(15) {
		j.r.Priority = first.r.Priority
		d.core.Join(first.r, j.r)
		first.legs, j.legs = true, true
	}
	d.core.Offer(d.now, j.r)
	j.prompt, j.endpoints = max(0, j.r.Prompt), j.r.Endpoints
	d.jobs = append(d.jobs, j)
}

// step takes a Step and checks all that must be true of it.
func (d *driver) step() {
	t, now := d.t, d.now
	fresh, open := map[string]bool{}, map[string]bool{}
	d.core.Status(now, func(s policy.Status) { fresh[s.Name], open[s.Name] = s.Fresh, s.Breaker })
	urgent := 0
	before := map[*policy.Request]policy.State{}
	for _, j := range d.jobs {
		before[j.r] = j.r.State()
		if j.r.Priority >= 1 && (j.r.State() == policy.Waiting || j.r.State() == policy.Active && !j.first) {
			urgent++
		}
	}
	st := d.core.Step(now)

	fail := func(format string, args ...any) { t.Errorf("at %v: "+format, append([]any{now}, args...)...) }
	if err := d.core.Check(now); err != nil {
		fail("%v", err)
	}
	victims := map[*policy.Request]bool{}
	evictedAt := map[string]bool{}
	for _, x := range st.Decisions {
		fmt.Fprintf(d.log, "%v %v %v %v %v %v %v %v\n", x.At, x.For.Tag.(*job).id, x.Why, x.Endpoint, x.Need, x.Freed, x.Work, x.Others)
		if len(x.Victims) == 0 {
			// It goes where room is coming, before that is there.
			evictedAt[x.Endpoint] = evictedAt[x.Endpoint] || x.Why == policy.WhyComing && d.cfg.Without&policy.Optimistic == 0
			continue
		}
		d.decision(fail, x, before, fresh, open)
		if urgent == 0 {
			fail("evicted, but nothing urgent waits")
		}
		evictedAt[x.Endpoint] = true
		for _, v := range x.Victims {
			fmt.Fprintln(d.log, v.Request.Tag.(*job).id)
			if !x.DryRun {
				if victims[v.Request] {
					fail("a victim twice")
				}
				victims[v.Request] = true
			}
		}
	}
	started := false // sheddable work
	for _, r := range st.Dispatch {
		j := r.Tag.(*job)
		fmt.Fprintln(d.log, j.id, r.Endpoint())
		d.seen.dispatched++
		if before[r] != policy.Waiting || r.State() != policy.Active {
			fail("dispatched: %d is in state %d, was in %d", j.id, r.State(), before[r])
		}
		if j.endpoints != nil && !slices.Contains(j.endpoints, r.Endpoint()) {
			fail("%d may run on %v, dispatched to %s", j.id, j.endpoints, r.Endpoint())
		}
		if !slices.Contains(d.names, r.Endpoint()) {
			fail("dispatched to %s", r.Endpoint())
		}
		started = started || r.Priority < 1
		j.home = r.Generation()
		d.homes[r.Endpoint()] = j.home
		before[r] = policy.Active
	}
	for _, x := range st.Reject {
		fmt.Fprintln(d.log, x.Request.Tag.(*job).id, x.Why)
		d.seen.rejected++
		if before[x.Request] != policy.Waiting || x.Request.State() != policy.Done {
			fail("rejected in state %d, was in %d", x.Request.State(), before[x.Request])
		}
		before[x.Request] = policy.Done
	}
	fmt.Fprintln(d.log, st.Next, st.Idle)
	if !st.Idle && st.Next <= now {
		fail("Next is %v", st.Next)
	}
	d.ledger(fail, st, before, victims, evictedAt, started)
}

// decision checks one that ends requests.
func (d *driver) decision(fail func(string, ...any), x *policy.Decision, before map[*policy.Request]policy.State, fresh, open map[string]bool) {
	demand := x.For.Tag.(*job)
	switch {
	case before[x.For] == policy.Active && !demand.first:
		d.seen.mended++
	case before[x.For] != policy.Waiting:
		fail("evicted for %d, in state %d", demand.id, before[x.For])
	}
	switch x.Why {
	case policy.WhyKV:
		d.seen.kv++
	case policy.WhySlot:
		d.seen.slot++
	case policy.WhyPrefill:
		d.seen.prefill++
	default:
		fail("evicted, because of %q", x.Why)
	}
	if x.DryRun {
		d.seen.dry++
	}
	if !d.cfg.Evict || x.DryRun != d.cfg.DryRun {
		fail("evicted, dry run: %v", x.DryRun)
	}
	if x.For.Priority < 1 {
		fail("evicted for priority %d", x.For.Priority)
	}
	if _, sampled := d.at[x.Endpoint]; !sampled || !fresh[x.Endpoint] {
		fail("evicted on %s without evidence", x.Endpoint)
	}
	if open[x.Endpoint] && d.cfg.Without&policy.Breakers == 0 {
		fail("evicted on %s, breaker open", x.Endpoint)
	}
	if demand.endpoints != nil && !slices.Contains(demand.endpoints, x.Endpoint) {
		fail("evicted on %s, demand may run on %v", x.Endpoint, demand.endpoints)
	}
	gamma, _ := d.core.Correction(x.Endpoint)
	freed, legs := 0.0, false
	for _, v := range x.Victims {
		j := v.Request.Tag.(*job)
		freed += gamma * float64(j.tokens())
		legs = legs || j.legs
		switch {
		case v.Priority != v.Request.Priority || v.Priority >= x.For.Priority || v.Priority >= 1:
			fail("priority %d evicted for %d", v.Priority, x.For.Priority)
		case v.Request.Endpoint() != x.Endpoint || before[v.Request] != policy.Active:
			fail("evicted %d on %s, in state %d", j.id, v.Request.Endpoint(), before[v.Request])
		case v.Request.Fixed || v.Request.Evictions >= policy.MaxEvictions:
			fail("evicted %d: fixed %v, evicted %d times before", j.id, v.Request.Fixed, v.Request.Evictions)
		case j.wasSpared && d.now < j.spared+time.Second:
			fail("evicted %d, spared at %v", j.id, j.spared)
		case d.cfg.Unstarted && j.first, x.Why == policy.WhyPrefill && j.first:
			fail("evicted %d after its first token", j.id)
		case v.Tokens != j.tokens():
			fail("victim %d has %d tokens, want %d", j.id, v.Tokens, j.tokens())
		case x.DryRun != (v.Request.State() == policy.Active):
			fail("victim %d is in state %d, dry run: %v", j.id, v.Request.State(), x.DryRun)
		}
	}
	if x.Why == policy.WhyPrefill || legs { // legs end with the first of them, unnamed
		return
	}
	if x.Why == policy.WhyKV && freed < float64(x.Need)-1 {
		fail("freed %v of %d", freed, x.Need)
	}
	for _, v := range x.Victims {
		t := gamma * float64(v.Tokens)
		if x.Why == policy.WhyKV && d.slots[x.Endpoint] == 0 && freed-t >= float64(x.Need)+1 && d.cfg.Without&policy.Reprieve == 0 {
			fail("freed %v for %d: the %v of one victim are redundant", freed, x.Need, t)
		}
	}
}

// ledger compares the core's with that of the test.
func (d *driver) ledger(fail func(string, ...any), st policy.Step, before map[*policy.Request]policy.State, victims map[*policy.Request]bool, evictedAt map[string]bool, started bool) {
	want := map[string]policy.Ledger{}
	for _, j := range d.jobs {
		now, was := j.r.State(), before[j.r]
		switch {
		case now == was:
		case was == policy.Active && now == policy.Reclaiming && victims[j.r]:
		case was == policy.Active && now == policy.Reclaiming && len(victims) > 0: // a leg
			d.seen.legs++
		case was == policy.Reclaiming && now == policy.Done:
		default:
			fail("%d went from state %d to %d", j.id, was, now)
		}
		if now == policy.Waiting {
			if n := j.r.Held(); n != "" {
				d.seen.held++
				if j.endpoints != nil && !slices.Contains(j.endpoints, n) {
					fail("%d may run on %v, held on %s", j.id, j.endpoints, n)
				}
				l := want[n]
				l.Holds++
				l.HoldTokens += (j.prompt+1+15)/16*16 + policy.Reserve
				want[n] = l
			}
			if j.r.Priority >= 1 && started {
				fail("sheddable work started, %d waits", j.id)
			}
		}
		n := j.r.Endpoint()
		if n == "" || d.homes[n] != j.home {
			continue // on an endpoint that was removed
		}
		l := want[n]
		switch now {
		case policy.Active:
			l.Active++
			l.ActiveTokens += j.tokens()
		case policy.Reclaiming:
			l.Reclaiming++
			l.ReclaimTokens += j.tokens()
		}
		want[n] = l
	}
	d.core.Status(d.now, func(s policy.Status) {
		got := d.core.Ledger(s.Name)
		if got != want[s.Name] {
			fail("%s has %+v, want %+v", s.Name, got, want[s.Name])
		}
		d.seen.wedged += s.Wedged
		if s.Breaker {
			d.seen.open++
		}
		used := float64(s.Occupied - s.Held)
		for _, r := range st.Dispatch {
			if r.Endpoint() != s.Name || evictedAt[s.Name] {
				continue
			}
			if used > 1.02*float64(s.Capacity) {
				fail("%s: dispatched to %v of %d", s.Name, used, s.Capacity)
			}
			if n := got.Active + got.Reclaiming; d.slots[s.Name] > 0 && n > d.slots[s.Name] {
				fail("%s: dispatched to %d of %d slots", s.Name, n, d.slots[s.Name])
			}
		}
	})
	if got := d.core.Waiting(); d.cfg.MaxWaiting > 0 && got > d.cfg.MaxWaiting {
		fail("%d wait, at most %d may", got, d.cfg.MaxWaiting)
	}
}
