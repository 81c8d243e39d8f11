package policy

import (
	"math"
	"slices"
	"time"
)

// decide looks at everything that waits, in order of service. Sheddable work starts only if
// nothing else waits.
func (c *Core) decide(now time.Duration) {
	c.pass++
	p := pass{Core: c, now: now, limit: -1}
	for _, e := range c.endpoints {
		if e.missed > 0 {
			e.missed = 0
			p.mend(e)
		}
	}
	kept := c.waiting[:0]
	all := c.waiting
	urgent := 0
	for i, r := range all {
		if r.Priority < c.cfg.Sheddable && urgent > 0 || p.stuck {
			kept = append(kept, all[i:]...)
			break
		}
		if p.blocked && r.need >= p.blockedFor && r.Endpoints == nil && r.held == nil && r.why == p.blockedWhy {
			kept = append(kept, r)
			urgent++
			continue
		}
		if p.place(r) {
			kept = append(kept, r)
			if r.Priority >= c.cfg.Sheddable {
				urgent++
			} else if len(r.Endpoints) == 0 {
				p.stuck = true // the rest of its kind waits for the first
			}
		}
	}
	clear(all[len(kept):])
	c.waiting = kept
	for len(c.waiting) > c.cfg.MaxWaiting {
		last := c.waiting[len(c.waiting)-1]
		c.waiting = slices.Delete(c.waiting, len(c.waiting)-1, len(c.waiting))
		c.reject(last, WhyOverloaded)
	}
}

// pass is one decision about all that waits.
type pass struct {
	*Core
	now   time.Duration
	limit int // victims that are left to this pass, -1 before it is known
	stuck bool
	vain  int // requests for which no victims were found

	// Of the smallest request that can go anywhere and found no place: larger ones of no higher
	// priority need not be tried.
	blocked    bool
	blockedFor int64
	blockedWhy Why
}

// place dispatches r or makes room for it, and reports whether it still waits.
func (p *pass) place(r *Request) bool {
	feasible := p.feasible(r)
	if !p.possible(r, feasible) {
		p.unhold(r)
		p.reject(r, WhyInfeasible)
		return false
	}
	if r.Priority < p.cfg.Sheddable {
		return p.placeSheddable(r, feasible)
	}
	if r.held != nil && (p.fits(r.held, r, true) || p.now-r.heldSince >= holdFor) {
		e := r.held
		p.unhold(r)
		if p.fits(e, r, false) {
			p.dispatch(r, e)
			return false
		}
	}
	if p.blocked && r.held == nil && r.Endpoints == nil && r.need >= p.blockedFor {
		p.refuse(r, p.blockedWhy, nil, nil)
		return true
	}
	if p.cfg.has(LateBinding) {
		if feasible = p.open(feasible); len(feasible) == 0 {
			return true
		}
	}
	if e := p.best(r, feasible); e != nil {
		p.unhold(r)
		if late := p.lateness(e, r); late > 0 && p.cfg.has(Relief) {
			e = p.relieve(r, feasible, e)
		}
		p.dispatch(r, e)
		return false
	}
	if r.held != nil {
		return true // its room is coming
	}
	return p.makeRoom(r, feasible)
}

// open returns those of es to which an urgent request may be sent now: where little prefill
// stands before it; if that is nowhere, all of them; and none if it would only queue wherever it
// went, behind what can't be recalled. It waits here then, can still go where first tokens come
// sooner than was forecast, and what it needs may come free by itself. Where there is no choice
// it would only give way to smaller ones.
func (p *pass) open(es []*endpoint) []*endpoint {
	if len(es) == 1 {
		return es
	}
	p.ready = p.ready[:0]
	firm := true
	for _, e := range es {
		if e.backlog(p.now) <= soon*float64(p.cfg.Chunk) {
			p.ready = append(p.ready, e)
		}
		firm = firm && e.firmBacklog(p.now) > ahead*float64(p.cfg.Chunk)
	}
	if len(p.ready) == 0 && !firm {
		return es
	}
	return p.ready
}

// feasible returns the endpoints where r can run.
func (p *pass) feasible(r *Request) []*endpoint {
	if r.Endpoints == nil {
		return p.endpoints
	}
	if r.feasible == nil || r.epoch != p.epoch {
		r.epoch = p.epoch
		r.feasible = make([]*endpoint, 0, len(r.Endpoints))
		for _, name := range r.Endpoints {
			if i, ok := p.find(name); ok {
				r.feasible = append(r.feasible, p.endpoints[i])
			}
		}
	}
	return r.feasible
}

// possible reports whether one of them could hold r if it were empty.
func (p *pass) possible(r *Request, es []*endpoint) bool {
	for _, e := range es {
		if e.capacity == 0 || float64(r.need) <= p.cfg.Ceiling*e.capacity {
			return true
		}
	}
	return false
}

// fits reports whether r fits on e now; held says that its room is in e's account already.
func (p *pass) fits(e *endpoint, r *Request, held bool) bool {
	x, free := e.occupancy(), e.free()
	if held {
		x -= float64(r.need)
		free++
	}
	return free > 0 && e.capacity > 0 && x+float64(r.need) <= p.cfg.Ceiling*e.capacity
}

// best returns where r fits and its first token comes soonest, or nil.
func (p *pass) best(r *Request, es []*endpoint) (best *endpoint) {
	least := math.Inf(1)
	for _, e := range es {
		if !p.fits(e, r, false) {
			continue
		}
		if w := 4*e.backlog(p.now) + e.occupancy()/8; w < least {
			best, least = e, w
		}
	}
	return best
}

// lateness is how many tokens of prefill are too many on e for r's target.
func (p *pass) lateness(e *endpoint, r *Request) float64 {
	return e.backlog(p.now) + float64(r.Prompt) - e.mu()*ms(max(r.slack(p.now), minSlack))
}

// relieve looks for where r, which fits but would be late, is served best when prefills of
// sheddable work are recalled for it, has them recalled and returns where it goes.
func (p *pass) relieve(r *Request, es []*endpoint, fallback *endpoint) *endpoint {
	if !p.cfg.Evict {
		return fallback
	}
	var best *endpoint
	least := 0.0
	for _, e := range es {
		if !p.fits(e, r, false) {
			continue
		}
		late := p.lateness(e, r)
		if late <= 0 {
			return e
		}
		if p.barred(e) != WhyNone {
			continue
		}
		saved := p.unstartedCover(p.now, e, r, late, p.victims())
		if len(e.cover.chosen) == 0 {
			continue
		}
		gain := min(saved, late) / e.mu()
		rest := max(0, late-saved) / e.mu()
		if cost := e.cover.cost + rest - gain; cost < least && p.affordable(e.cover.work) {
			best, least = e, cost
		}
	}
	if best == nil {
		return fallback
	}
	p.evict(r, best, WhyPrefill, p.lateness(best, r), 0, nil)
	if p.cfg.DryRun {
		return fallback
	}
	return best
}

// makeRoom evicts what r needs on the endpoint where that costs least, and reports whether r
// still waits.
func (p *pass) makeRoom(r *Request, es []*endpoint) bool {
	if !p.cfg.Evict {
		return p.refuse(r, WhyDisabled, nil, nil)
	}
	if p.vain >= maxVain {
		return true
	}
	var best *endpoint
	var bestNeed, bestComing float64
	least := math.Inf(1)
	why := WhyNothing
	var others []Option
	explain := r.why == WhyNone // the first time that it is looked at
	for _, e := range es {
		if e.capacity == 0 || float64(r.need) > p.cfg.Ceiling*e.capacity {
			continue
		}
		coming, comingSlots := e.coming()
		need := e.occupancy() - coming + float64(r.need) - p.cfg.Ceiling*e.capacity
		slots := 1 - min(e.free()+comingSlots, 1)
		if need <= 0 && slots <= 0 {
			p.refuse(r, WhyComing, e, nil)
			if p.cfg.has(Optimistic) && !p.cfg.DryRun {
				p.dispatch(r, e)
				return false
			}
			p.hold(p.now, r, e)
			return true
		}
		not := p.barred(e)
		if not == WhyNone && p.hopeless(r) {
			not = WhyHopeless
		}
		if not == WhyNone {
			switch {
			case !p.choose(p.now, e, r, need, slots, p.victims()):
				not = WhyNothing
			case !p.affordable(e.cover.work):
				not = WhyBudget
			}
		}
		if not != WhyNone {
			if why == WhyNothing {
				why = not
			}
			if explain {
				others = append(others, Option{Endpoint: e.name, Why: not, Need: int64(need)})
			}
			continue
		}
		cost := e.cover.cost + e.backlog(p.now)/e.mu()
		if cost >= least {
			others = append(others, Option{Endpoint: e.name, Why: WhyKV, Need: int64(need), Cost: cost})
			continue
		}
		if best != nil {
			others = append(others, Option{Endpoint: best.name, Why: WhyKV, Need: int64(bestNeed), Cost: least})
		}
		best, least, bestNeed, bestComing = e, cost, need, coming
	}
	if best == nil {
		p.vain++
		p.refuse(r, why, nil, others)
		if r.Endpoints == nil && !p.hopeless(r) { // others may have more time
			p.blocked, p.blockedFor, p.blockedWhy = true, r.need, why
		}
		return true
	}
	reason := WhyKV
	if bestNeed <= 0 {
		reason = WhySlot
	}
	p.evict(r, best, reason, bestNeed, bestComing, others)
	if p.cfg.DryRun {
		return true
	}
	if p.cfg.has(Optimistic) {
		p.dispatch(r, best)
		return false
	}
	p.hold(p.now, r, best)
	return true
}

// mend makes up for evictions on e that came to nothing: for the first urgent request that was
// sent there and has no first token.
func (p *pass) mend(e *endpoint) {
	i := slices.IndexFunc(e.unstarted, func(r *Request) bool { return r.Priority >= p.cfg.Sheddable })
	if i < 0 || !p.cfg.Evict || p.barred(e) != WhyNone {
		return
	}
	coming, comingSlots := e.coming()
	need := e.occupancy() - coming - p.cfg.Ceiling*e.capacity
	slots := max(0, -e.free()-comingSlots)
	if (need > 0 || slots > 0) && p.choose(p.now, e, e.unstarted[i], need, slots, p.victims()) && p.affordable(e.cover.work) {
		why := WhyKV
		if need <= 0 {
			why = WhySlot
		}
		p.evict(e.unstarted[i], e, why, need, coming, nil)
	}
}

// barred says why nothing may be evicted on e, if so.
func (p *pass) barred(e *endpoint) Why {
	switch {
	case !e.fresh(p.now):
		return WhyStale
	case p.cfg.has(Breakers) && e.open(p.now):
		return WhyBreaker
	}
	return WhyNone
}

// hopeless reports whether an eviction comes too late for r's target.
func (p *pass) hopeless(r *Request) bool {
	if !p.cfg.has(Hopeless) {
		return false
	}
	waited := p.now - r.offered
	if waited+p.relief.p95 <= r.target() || waited >= 2*r.target() {
		return false // in time, or so late that it must not wait for others' mercy
	}
	if !p.cfg.DryRun {
		p.lower(p.now) // what can help is room that is there before
	}
	return true
}

// affordable reports whether the budget has so much work.
func (p *pass) affordable(work float64) bool {
	return !p.cfg.has(Budget) || work <= p.budget.left
}

// victims returns how many this pass may still choose.
func (p *pass) victims() int {
	if p.limit < 0 {
		n := 0
		for _, e := range p.endpoints {
			n += len(p.candidates(p.now, e).candidates)
		}
		p.limit = max(4, n/4)
	}
	return p.limit
}

// evict decides that the cover of e ends for r.
func (p *pass) evict(r *Request, e *endpoint, why Why, need, coming float64, others []Option) {
	if p.cfg.DryRun {
		if r.dry {
			return
		}
		r.dry = true
	}
	v := &e.cover
	d := &Decision{
		At: p.now, For: r, Waited: p.now - r.offered, Why: why, Endpoint: e.name, DryRun: p.cfg.DryRun,
		Need: int64(max(0, need)), Freed: int64(v.tokens), Coming: int64(coming), Work: v.work, Others: others,
	}
	r.why = why
	p.step.Decisions = append(p.step.Decisions, d)
	for _, i := range v.chosen {
		a := &v.candidates[i]
		if a.r.state != Active {
			continue // a leg of the one before
		}
		d.Victims = append(d.Victims, Victim{a.r, a.r.Priority, a.r.tokens, a.r.generated, p.now - a.r.dispatched, v.lost(a)})
		if p.cfg.DryRun {
			continue
		}
		v.left -= a.tokens
		a.r.evicted = true
		e.reclaim(p.now, a.r)
		for _, leg := range a.r.otherLegs() {
			if leg.state == Active && !leg.ep.gone {
				leg.evicted = true
				leg.ep.reclaim(p.now, leg)
				leg.ep.pass = 0 // its candidates are other ones now
			}
		}
	}
	if p.cfg.DryRun {
		return
	}
	p.limit -= len(v.chosen)
	if p.cfg.has(Budget) {
		p.budget.left -= v.work
	}
	p.lower(p.now)
}

// refuse says why nobody is evicted for r, if that is news, and reports that r still waits.
func (p *pass) refuse(r *Request, why Why, e *endpoint, others []Option) bool {
	if r.why == why {
		return true
	}
	r.why = why
	d := &Decision{At: p.now, For: r, Waited: p.now - r.offered, Why: why, DryRun: p.cfg.DryRun, Others: others}
	if e != nil {
		d.Endpoint = e.name
	}
	p.step.Decisions = append(p.step.Decisions, d)
	return true
}

// placeSheddable starts r if there is room to spare, and reports whether it still waits.
func (p *pass) placeSheddable(r *Request, es []*endpoint) bool {
	need := float64(r.need-reserve) + p.answers.mean()/2
	var best *endpoint
	least := math.Inf(1)
	for _, e := range es {
		x := e.occupancy()
		// A request that is larger than the ceiling goes where nothing else is.
		if e.free() <= 0 || e.capacity == 0 || x+need > p.ceiling*e.capacity && (x > 0.05*e.capacity || float64(r.need) > p.cfg.Ceiling*e.capacity) {
			continue
		}
		if b := e.backlog(p.now); b > 0 && b+float64(r.Prompt) > float64(p.cfg.Chunk)/2 {
			continue
		}
		if x < least {
			best, least = e, x
		}
	}
	if best == nil {
		return true
	}
	p.dispatch(r, best)
	return false
}

func (p *pass) dispatch(r *Request, e *endpoint) {
	e.add(p.now, r)
	p.step.Dispatch = append(p.step.Dispatch, r)
}

func (c *Core) reject(r *Request, why Why) {
	c.unhold(r)
	r.state = Done
	c.step.Reject = append(c.step.Reject, Rejection{r, why})
}
