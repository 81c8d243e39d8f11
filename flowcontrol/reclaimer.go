package flowcontrol

import (
	"cmp"
	"context"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
)

// How a Reclaimer judges. Times are of the order of a request's round trips.
const (
	hungAfter   = 250 * time.Millisecond // an aborted request's stream is not counted on that has not ended by then
	settling    = 50 * time.Millisecond  // from a request's own end until gauges surely show it
	patience    = time.Second            // the same from the end of an aborted request's stream
	wedgedAfter = 2 * time.Second        // when an eviction is judged although a victim's stream has not ended
	forgotten   = 30 * time.Second       // a hung request is left to the gauge
	unitFor     = 2 * time.Second        // how long the gauge's unit is believed while it can't be measured exactly
	sparedFor   = time.Second            // how long a request is spared that could not be ended
	staleFloor  = 250 * time.Millisecond
	staleFirst  = time.Second     // before the gauge's period is known
	longPeriod  = 2 * time.Second // no gauge's usual period is taken to be longer
	absurd      = 10              // no gauge is so many times above its ceiling
	breakAt     = 3
	breakFor    = 30 * time.Second
	maxAttempts = 3    // of one request's work to be evicted
	maxScopes   = 1024 // that are kept although they are idle
	idleAfter   = time.Minute

	lostBase    = 5 * time.Millisecond // engine time, however little an eviction destroys
	lostToken   = 25 * time.Microsecond
	lostChunk   = 250 * time.Microsecond
	budgetShare = 10 // one part in so many of the endpoints' time may be destroyed
	budgetBurst = 2 * time.Second
)

// A Pressure is a scheduler's situation when it could not dispatch.
type Pressure struct {
	Saturation, Ceiling float64   // in the same unit; work is dispatched while Saturation < Ceiling
	Sampled             time.Time // when Saturation was true, not when it was read
	Waiting             []Waiting // what is blocked, of one priority in the order in which it is dispatched
	Endpoint            string    // whose saturation that is; "" for the whole pool's
}

// A Reclaimer is for a scheduler that has its own queue and saturation gauge: it evicts what
// blocked work needs. All methods are safe for concurrent use. It has no goroutine and needs
// no Close.
//
// The requests that the Evictor tracks are its ledger, and the gauge should show these and not
// much else. If all of them and all that waits say their Tokens, the gauge is taken to be
// proportional to tokens, else to the number of requests. Track a request when it is
// dispatched.
//
//	for sched.blocked() {
//		p := flowcontrol.Pressure{Saturation: gauge.Value, Sampled: gauge.At, Ceiling: 0.9, Waiting: sched.waiting()}
//		decision, err := reclaimer.Reclaim(ctx, p)
//		...
//	}
type Reclaimer struct {
	ev  *evictor.Evictor
	cfg config

	mu      sync.Mutex // guards what follows and every holding; never held across a call out, but a handle's lock nests inside
	looked  time.Time  // when the Evictor's requests were last looked at
	leaving []*holding // those that have settled, as long as a gauge may show them
	kept    int        // how many were left of leaving when it was last pruned
	scopes  map[string]*scope
	untold  []Decision // for the observer
	telling bool       // some Reclaim tells them
}

// NewReclaimer returns a Reclaimer that evicts through ev. Its options are WithEvictionBelow,
// WithSpareStarted, WithDryRun and WithObserver; it ignores the others, which are a Pool's. It
// panics if ev is nil.
func NewReclaimer(ev *evictor.Evictor, opts ...Option) *Reclaimer {
	if ev == nil {
		panic("flowcontrol: NewReclaimer: nil Evictor")
	}
	return &Reclaimer{ev: ev, cfg: configure(opts), scopes: make(map[string]*scope)}
}

// Estimate returns what the gauge would say now: its sample, and what the ledger says was
// dispatched and came free since, victims when their streams end. A scheduler whose gauge lags
// should dispatch while this is below the ceiling, and ask again after each dispatch. A sample
// that is stale or no number is returned as it is.
func (r *Reclaimer) Estimate(p Pressure) float64 {
	waiting := p.order()
	now := time.Now()
	present := r.look()
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.scopeLocked(p.Endpoint, now)
	if !s.fresh(&p, now) {
		return p.Saturation
	}
	a := r.accountLocked(s, &p, waiting, present, now)
	return a.estimate(p.Saturation)
}

// order returns what waits for the gauge's capacity, what matters most first.
func (p *Pressure) order() []Waiting {
	ws := slices.DeleteFunc(slices.Clone(p.Waiting), func(w Waiting) bool {
		return w.Endpoints != nil && (len(w.Endpoints) == 0 || p.Endpoint != "" && !slices.Contains(w.Endpoints, p.Endpoint))
	})
	slices.SortStableFunc(ws, func(a, b Waiting) int { return cmp.Compare(b.Priority, a.Priority) })
	return ws
}

// Reclaim makes one decision for all that waits and carries it out. It waits for Aborters, for
// up to 250 ms, and never for effects. Call it whenever dispatch is blocked: what it has ended
// before, by whatever call, it credits as long as that can still come free.
//
// The Decision is the zero one if nothing is blocked: nothing waits, or what waits may start by
// both the gauge and [Reclaimer.Estimate]. Otherwise it evicts, as little as lets as much of
// what waits start as is possible and affordable, or its Why is Coming, Disabled, Stale,
// Breaker, Budget or Nothing. Evictions that take capacity in tokens are KV; if tokens are
// unknown they are Slot, and Need, Freed and Coming count requests.
//
// A sample is stale if it has no time or a future one, is no number, negative, or older than
// three usual periods, which are taken to be at most 2 s, or 250 ms; without a period known,
// 1 s. Neither is one of ten times the ceiling evidence. Who was evicted 3 times before is
// spared. No more work is destroyed than 10 % of the endpoints' time, after 2 s of each. After
// 3 decisions in a row whose effect the gauge does not show, or whose victims' streams don't
// end, nobody is evicted there for 30 s.
//
// If ctx is done nobody else is evicted, and the error is or has ctx's cause. The error also
// joins those of Aborters; whom they spared is not chosen again for a second.
func (r *Reclaimer) Reclaim(ctx context.Context, p Pressure) (Decision, error) {
	if ctx.Err() != nil {
		return Decision{}, context.Cause(ctx)
	}
	waiting := p.order()
	now := time.Now()
	present := r.look()
	r.mu.Lock()
	s := r.scopeLocked(p.Endpoint, now)
	d, blocked := r.barLocked(s, &p, waiting, present, now)
	r.mu.Unlock()
	if !blocked || d.Why != "" {
		return r.conclude(s, d), nil
	}

	demand := evictor.Demand{
		N: math.MaxInt, Below: min(d.For.Priority, r.cfg.Sheddable), Endpoint: p.Endpoint,
		DryRun: true, Reason: abort.Preempted,
	}
	if r.cfg.Unstarted {
		demand.Before = abort.Streaming
	}
	order, err := r.ev.Evict(ctx, demand) // the Evictor's order may be somebody's code
	if err != nil {
		return Decision{}, err
	}
	r.mu.Lock()
	t := r.chooseLocked(s, &p, waiting, present, order, now, &d)
	r.mu.Unlock()
	if t != nil {
		err = r.evict(ctx, demand, s, t, &d)
	}
	return r.conclude(s, d), err
}

// barLocked says whether anything is blocked, and why nobody is evicted for it if that is clear
// before anybody is looked at.
func (r *Reclaimer) barLocked(s *scope, p *Pressure, waiting []Waiting, present []*holding, now time.Time) (d Decision, blocked bool) {
	if len(waiting) == 0 {
		s.since = now
		return d, false
	}
	d = Decision{For: waiting[0], Endpoint: p.Endpoint, DryRun: r.cfg.DryRun}
	fresh := s.fresh(p, now)
	if fresh {
		a := r.accountLocked(s, p, waiting, present, now)
		s.judge(&a, p, now)
		if p.Saturation < p.Ceiling && a.estimate(p.Saturation) < p.Ceiling {
			s.since = now
			return Decision{}, false
		}
		if need := a.need(p, 0); need <= 0 {
			d.Why, d.Coming = Coming, whole(a.coming)
		}
	}
	d.Waited = now.Sub(s.since)
	switch {
	case !r.cfg.Evict:
		d.Why = Disabled
	case !fresh:
		d.Why = Stale
	case now.Before(s.open):
		d.Why = Breaker
	case d.Why == Coming && len(waiting) > 1:
		d.Why = "" // the others may need more
	}
	return d, true
}

// need is what must come free beside what is coming, if so much of what waits starts before the
// last of it.
func (a *account) need(p *Pressure, before float64) float64 {
	x := (p.Saturation-p.Ceiling)*a.unit + a.staying - a.shown + before
	// The last one starts below the ceiling, not at it.
	return math.Floor(x+1e-9*max(1, p.Saturation*a.unit)) + 1
}

// whole is f as a count.
func whole(f float64) int64 {
	if !(f > 0) {
		return 0
	}
	return int64(min(f, 1<<62))
}

// judge looks for the effects of decisions. The victims are in no gauge any longer if they were
// ended; if they weren't, the gauge shows more than the ledger.
func (s *scope) judge(a *account, p *Pressure, now time.Time) {
	hung := 0
	s.unproven = slices.DeleteFunc(s.unproven, func(t *trial) bool {
		end, all := t.at, true
		for _, x := range t.victims {
			if x.ended.After(end) {
				end = x.ended
			}
			all = all && !x.ended.IsZero()
		}
		if !all {
			end = t.at.Add(wedgedAfter)
		}
		for _, x := range t.victims {
			if all {
				x.ended = end // so that they are credited for as long, not replaced one by one
			}
		}
		due := end.Add(patience)
		if p.Sampled.Before(due) {
			if slices.ContainsFunc(t.victims, func(x *holding) bool { return x.hung(now) }) {
				hung++
			}
			return false
		}
		if now.Sub(due) > 10*patience {
			return true // nobody looked in time
		}
		freed := 0.0
		for _, n := range t.sizes {
			freed += n
		}
		if p.Saturation*t.unit > a.shown+freed/2 {
			s.failed++
		} else {
			s.failed = 0
		}
		return true
	})
	if max(hung, s.failed) >= breakAt {
		s.open, s.failed, s.unproven = now.Add(breakFor), 0, nil
	}
}

// evict ends the victims of t, and leaves in d those that were.
func (r *Reclaimer) evict(ctx context.Context, demand evictor.Demand, s *scope, t *trial, d *Decision) (err error) {
	ctx, cancel := context.WithTimeout(ctx, hungAfter)
	defer cancel()
	victims := make(map[*abort.Handle]int, len(t.victims))
	for _, v := range d.Victims {
		victims[v.Handle] = v.Priority
	}
	demand.N, demand.DryRun = len(victims), false
	demand.Spare = func(h *abort.Handle) bool {
		priority, ok := victims[h]
		reqs := h.Requests()
		return !ok || len(reqs) == 0 || reqs[0].Priority > priority
	}
	var ended []*abort.Handle
	defer func() { // also behind a panic in the Evictor's order
		r.mu.Lock()
		defer r.mu.Unlock()
		r.bookLocked(s, t, ended, d)
	}()
	ended, err = r.ev.Evict(ctx, demand)
	return err
}

// bookLocked books who was ended of those that were to be.
func (r *Reclaimer) bookLocked(s *scope, t *trial, ended []*abort.Handle, d *Decision) {
	if len(ended) == len(t.victims) {
		return
	}
	now := time.Now()
	var kept trial
	var victims []Victim
	for i, x := range t.victims {
		v := d.Victims[i]
		if slices.Contains(ended, x.h) {
			kept.victims, kept.sizes = append(kept.victims, x), append(kept.sizes, t.sizes[i])
			victims = append(victims, v)
			continue
		}
		x.chosen, x.spared = time.Time{}, now.Add(sparedFor)
		d.Freed -= whole(t.sizes[i])
		d.Lost -= v.Lost
		s.budget += v.Lost
	}
	t.victims, t.sizes, d.Victims = kept.victims, kept.sizes, victims
	if len(victims) == 0 {
		d.Why = Nothing
		s.unproven = slices.DeleteFunc(s.unproven, func(u *trial) bool { return u == t })
	}
}

// conclude returns d, and has the observer told if it is news.
func (r *Reclaimer) conclude(s *scope, d Decision) Decision {
	const most = 1000
	r.mu.Lock()
	news := d.Why != "" && d.Why != s.last || d.Evicts() && !d.DryRun
	s.last = d.Why
	if r.cfg.observe == nil || !news {
		r.mu.Unlock()
		return d
	}
	if len(r.untold) >= most {
		r.untold = slices.Delete(r.untold, 0, 1)
	}
	r.untold = append(r.untold, d)
	if r.telling {
		r.mu.Unlock()
		return d
	}
	r.telling = true
	for len(r.untold) > 0 {
		next := r.untold[0]
		r.untold = r.untold[1:]
		r.mu.Unlock()
		func() {
			defer func() { _ = recover() }() // an observer's panic is not the scheduler's
			r.cfg.observe(next)
		}()
		r.mu.Lock()
	}
	r.telling, r.untold = false, nil
	r.mu.Unlock()
	return d
}
