package policy

import (
	"math"
	"slices"
	"strings"
	"time"
)

// A Core decides. Make it with New. It is for one goroutine at a time.
type Core struct {
	cfg       Config
	endpoints []*endpoint // in order of their names
	epoch     uint64      // of the set of endpoints
	waiting   []*Request  // in order of service
	seq       uint64
	pass      uint64

	relief  relief
	budget  budget
	answers history // of sheddable work

	ceiling float64       // of sheddable work now
	raised  time.Duration // when it was last raised or lowered
	lowered time.Duration
	evicted bool

	step  Step
	ready []*endpoint // buffer of pass.open
}

// New returns a Core without endpoints. It panics if c makes no sense.
func New(c Config) *Core {
	c = c.withDefaults()
	core := &Core{cfg: c, ceiling: c.SheddableCeiling}
	core.relief.lag = firstLag
	core.relief.mean = firstLag + firstEnd
	core.relief.p95 = firstLag + minLag
	return core
}

func (c *Core) find(name string) (int, bool) {
	return slices.BinarySearchFunc(c.endpoints, name, func(e *endpoint, n string) int { return strings.Compare(e.name, n) })
}

// SetEndpoint adds an endpoint or changes its capacity and slots.
func (c *Core) SetEndpoint(now time.Duration, d Endpoint) {
	c.budget.fill(now, len(c.endpoints))
	i, ok := c.find(d.Name)
	if !ok {
		c.endpoints = slices.Insert(c.endpoints, i, newEndpoint(&c.cfg, d.Name))
		c.epoch++
		c.budget.left += budgetBurst
	}
	e := c.endpoints[i]
	if d.Capacity > 0 || !e.sampled {
		e.capacity = float64(min(max(0, d.Capacity), maxTokens))
	}
	e.slots = max(0, d.Slots)
}

// RemoveEndpoint removes an endpoint. What runs there runs on, and is in the account of
// no endpoint that comes back under the same name.
func (c *Core) RemoveEndpoint(now time.Duration, name string) {
	i, ok := c.find(name)
	if !ok {
		return
	}
	c.budget.fill(now, len(c.endpoints))
	e := c.endpoints[i]
	e.gone = true
	c.endpoints = slices.Delete(c.endpoints, i, i+1)
	c.epoch++
	c.budget.left = min(c.budget.left, budgetBurst*float64(len(c.endpoints)))
	for _, r := range c.waiting {
		if r.held == e {
			c.unhold(r)
		}
	}
	for len(e.reclaiming) > 0 {
		e.settle(e.reclaiming[0])
	}
}

// Offer puts r in the queue. The next Step dispatches it, rejects it or lets it wait.
func (c *Core) Offer(now time.Duration, r *Request) {
	if r.state != Unoffered {
		panic("flowcontrol: request offered twice")
	}
	r.Prompt = min(max(r.Prompt, 0), maxTokens)
	r.Evictions = max(r.Evictions, 0)
	c.seq++
	r.state, r.seq, r.offered, r.why = Waiting, c.seq, now, WhyNone
	r.need = blocks(r.Prompt+1, c.cfg.Block) + reserve
	i, _ := slices.BinarySearchFunc(c.waiting, r, before)
	c.waiting = slices.Insert(c.waiting, i, r)
}

// before is the order of service: what matters more first; of the same priority, work that
// was evicted first, the rest as it came.
func before(a, b *Request) int {
	switch {
	case a.Priority != b.Priority:
		return order(a.Priority > b.Priority)
	case (a.Evictions > 0) != (b.Evictions > 0):
		return order(a.Evictions > 0)
	}
	return order(a.seq < b.seq)
}

func order(before bool) int {
	if before {
		return -1
	}
	return 1
}

// Finish books that r is over by itself: its answer is complete, or if that is all that
// is known, it no longer holds anything. Harmless for a request that is Done.
func (c *Core) Finish(now time.Duration, r *Request, complete bool) {
	switch r.state {
	case Waiting:
		c.dequeue(r)
	case Active:
		if complete && r.Priority < c.cfg.Sheddable && r.generated > 0 {
			c.answers.add(r.generated)
		}
		r.ep.remove(r)
	case Reclaiming:
		r.ep.settle(r)
	}
	r.state = Done
}

// Leave books that r was ended by somebody else: its client has left, or an operator ended
// it. What it holds comes back as after an eviction. Of a request that is Reclaiming it says
// only that Spared can't be true: that it has left is no end of its stream.
func (c *Core) Leave(now time.Duration, r *Request) {
	switch r.state {
	case Waiting:
		c.dequeue(r)
		r.state = Done
	case Active:
		if r.ep.gone {
			r.ep.remove(r)
			r.state = Done
			return
		}
		r.ep.reclaim(now, r)
		c.end(now, r)
	case Reclaiming:
		r.left = true
	}
}

// Ended books that the stream of an evicted request has ended.
func (c *Core) Ended(now time.Duration, r *Request) {
	if r.state == Reclaiming && r.ended < 0 {
		c.end(now, r)
		c.relief.book(r.due - r.issued)
		if r.ep.judged(r) {
			r.ep.unproven = append(r.ep.unproven, r)
		}
	}
	for _, leg := range r.otherLegs() {
		if leg.state == Reclaiming && leg.ended < 0 {
			c.end(now, leg)
		}
	}
}

func (c *Core) end(now time.Duration, r *Request) {
	r.ended, r.due = now, now+c.relief.lag
}

// Spared books that an eviction failed: r runs on with all its legs, and is not chosen again
// for a second.
func (c *Core) Spared(now time.Duration, r *Request) {
	c.resume(now, r)
	for _, leg := range r.otherLegs() {
		c.resume(now, leg)
	}
}

func (c *Core) resume(now time.Duration, r *Request) {
	if r.state != Reclaiming || r.ended >= 0 {
		return
	}
	if r.left {
		c.end(now, r)
		return
	}
	if !r.hung {
		r.ep.missed++
	}
	r.ep.resume(r)
	r.evicted, r.spared = false, now+holdFor
}

// Join says that r, not offered yet, is a leg of the same work as first: who evicts one evicts
// all.
func (c *Core) Join(first, r *Request) {
	if first.legs == nil {
		first.legs = &[]*Request{first}
	}
	r.legs = first.legs
	*r.legs = append(*r.legs, r)
}

func (r *Request) otherLegs() []*Request {
	if r.legs == nil {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(*r.legs), func(o *Request) bool { return o == r })
}

// Count books what is known of an active request's progress: whether its first token was
// seen, and how many tokens it has generated, neither of which goes back.
func (c *Core) Count(now time.Duration, r *Request, first bool, generated int64) {
	if r.state == Active {
		r.ep.count(now, r, first, true, min(generated, maxTokens))
	}
}

// Guess is Count for a request whose progress nobody may be seeing: it is taken to have its
// first token when its prefill should be done, and another every 20 ms. If that nobody sees
// it is not sure, the first token has twice as long, and what a few steps of the engine take.
func (c *Core) Guess(now time.Duration, r *Request, sure bool) {
	if r.state != Active {
		return
	}
	e := r.ep
	if !r.first {
		due := dur(float64(r.Prompt) / e.mu())
		if !sure {
			due = 2*due + 150*time.Millisecond
		}
		if now-max(e.lastFirst, r.dispatched) < due {
			return
		}
	}
	const interval = 20 * time.Millisecond
	e.count(now, r, true, false, int64((now-r.dispatched)/interval))
}

// Unanswered reports whether a request's first token was not seen.
func (r *Request) Unanswered() bool { return !r.first }

// Waiting returns how many requests wait.
func (c *Core) Waiting() int { return len(c.waiting) }

// Delay forecasts how long a new request would wait for its first token.
func (c *Core) Delay(now time.Duration) time.Duration {
	queue, speed, least := 0.0, 0.0, math.Inf(1)
	for _, r := range c.waiting {
		queue += float64(r.Prompt)
	}
	for _, e := range c.endpoints {
		speed += e.mu()
		least = min(least, e.backlog(now)/e.mu())
	}
	if speed == 0 {
		return math.MaxInt64 / 2
	}
	return dur(least + queue/speed)
}

// A Status is what the core knows of an endpoint.
type Status struct {
	Name     string
	Capacity int64   // tokens
	Occupied int64   // tokens, of those in the ledger and foreign ones, as corrected by samples
	Held     int64   // tokens of them that are held for requests that wait
	Active   int     // requests
	Ending   int     // requests that were ended and are not yet taken to be gone
	Wedged   int     // of Ending: their streams don't end
	Backlog  int64   // prompt tokens without a first token
	Speed    float64 // of prefill, tokens per ms
	Fresh    bool    // there is evidence for evictions
	Breaker  bool    // open: no evictions
}

// Status calls yield for each endpoint, in order of names.
func (c *Core) Status(now time.Duration, yield func(Status)) {
	for _, e := range c.endpoints {
		s := Status{
			Name: e.name, Capacity: int64(e.capacity), Occupied: int64(e.occupancy()), Held: e.holdTokens,
			Active: len(e.active), Ending: len(e.reclaiming), Backlog: int64(e.backlog(now)), Speed: e.mu(),
			Fresh: e.fresh(now), Breaker: e.open(now),
		}
		for _, r := range e.reclaiming {
			if r.wedged {
				s.Wedged++
			}
		}
		yield(s)
	}
}

// Budget returns the engine time in ms that evictions may destroy now.
func (c *Core) Budget() float64 { return c.budget.left }

// SheddableCeiling returns how full an endpoint may be for sheddable work to start there now.
func (c *Core) SheddableCeiling() float64 { return c.ceiling }

// Lag returns how long an engine is taken to need, from the end of a stream, to free what it held.
func (c *Core) Lag() time.Duration { return c.relief.lag }

// Active calls yield for each active request, until it returns false.
func (c *Core) Active(yield func(*Request) bool) {
	for _, e := range c.endpoints {
		for _, r := range e.active {
			if !yield(r) {
				return
			}
		}
	}
}

// Unstarted calls yield for each active request without a first token. Yield may call Count.
func (c *Core) Unstarted(yield func(*Request) bool) {
	for _, e := range c.endpoints {
		for i := 0; i < len(e.unstarted); {
			r := e.unstarted[i]
			if !yield(r) {
				return
			}
			if i < len(e.unstarted) && e.unstarted[i] == r {
				i++
			}
		}
	}
}

// Sample takes a sample of the endpoint, and reports whether it was any good: of a known
// endpoint, newer than the last one, not of the future, and credible.
func (c *Core) Sample(now time.Duration, name string, s Sample) bool {
	i, ok := c.find(name)
	if !ok {
		return false
	}
	e := c.endpoints[i]
	was, before := e.gamma*e.recall(now, s.At)+e.foreign, e.last.At
	good := e.observe(now, s)
	if good {
		c.prove(now, e, was, before)
	}
	return good
}

// prove looks in a fresh sample for the fall that evictions should have caused. was is what
// the ledger expected at its time, before it learned from it; before is the time of the last one.
func (c *Core) prove(now time.Duration, e *endpoint, was float64, before time.Duration) {
	used := min(float64(e.last.Used), e.capacity)
	// What the ledger had let go by then, but no sample has shown, is back in the expectation.
	for _, r := range e.unproven {
		if r.state == Done && r.due <= e.last.At {
			was += e.gamma * float64(r.tokens)
		}
	}
	fall := was - used
	kept := e.unproven[:0]
	for _, r := range e.unproven {
		t := e.gamma * float64(r.tokens)
		switch {
		case e.last.At > r.ended && fall >= t/2:
			fall -= t
			e.effect(now, true)
			if c.cfg.has(LearnedLag) && e.last.At-before <= maxLag/4 { // rarer ones can't tell
				c.relief.learnLag(before-r.ended, e.last.At-r.ended)
			}
		case e.last.At > r.ended+maxLag+3*e.period:
			e.effect(now, false)
		default:
			kept = append(kept, r)
		}
	}
	clear(e.unproven[len(kept):])
	e.unproven = kept
	for i := 0; i < len(e.reclaiming); {
		r := e.reclaiming[i]
		if t := e.gamma * float64(r.tokens); r.wedged && r.ended < 0 && r.first && fall >= t/2 {
			fall -= t
			e.settle(r)
			continue
		}
		i++
	}
}

// judged reports whether the fall that the end of r should cause can be seen in samples.
func (e *endpoint) judged(r *Request) bool {
	return r.first && r.evicted && float64(r.tokens) >= 0.02*e.capacity
}

// hang books that the end of r's stream is not counted on any more.
func (e *endpoint) hang(r *Request) {
	if !r.hung {
		r.hung = true
		e.missed++
	}
}

// expire books what time alone does, and returns when it does something next.
func (c *Core) expire(now time.Duration) (next time.Duration, idle bool) {
	idle = true
	at := func(t time.Duration) {
		if idle || t < next {
			next, idle = t, false
		}
	}
	for _, e := range c.endpoints {
		for i := 0; i < len(e.reclaiming); {
			r := e.reclaiming[i]
			switch {
			case r.ended >= 0 && now >= r.due:
				e.settle(r)
				continue
			case r.ended >= 0:
				at(r.due)
			case !r.wedged && now >= r.issued+wedgedAfter:
				e.hang(r)
				r.wedged = true
				e.wedge(now)
				continue // with what a wedged one waits for
			case r.wedged && now >= r.issued+Forgotten:
				e.settle(r) // if it still holds anything, samples will say so
				continue
			case r.wedged:
				at(r.issued + Forgotten)
			default:
				at(r.issued + wedgedAfter)
				if t := r.issued + c.relief.overdue(); now < t {
					at(t)
				} else {
					e.hang(r)
				}
			}
			i++
		}
	}
	return next, idle
}

// Step decides about everything that waits, and says when to call it again if nothing
// happens before.
func (c *Core) Step(now time.Duration) Step {
	s := &c.step
	clear(s.Decisions)
	clear(s.Dispatch)
	clear(s.Reject)
	s.Decisions, s.Dispatch, s.Reject = s.Decisions[:0], s.Dispatch[:0], s.Reject[:0]
	s.Next, s.Idle = c.expire(now)
	for _, e := range c.endpoints {
		e.remember(now)
	}
	missed := slices.ContainsFunc(c.endpoints, func(e *endpoint) bool { return e.missed > 0 })
	if len(c.waiting) > 0 || missed {
		c.adapt(now)
		c.budget.fill(now, len(c.endpoints))
		c.decide(now)
		if next, idle := c.expire(now); !idle && (s.Idle || next < s.Next) {
			s.Next, s.Idle = next, false
		}
		if len(c.waiting) > 0 && (s.Idle || now+recheck < s.Next) {
			s.Next, s.Idle = now+recheck, false
		}
	}
	return *s
}

// adapt moves the ceiling of sheddable work: up with time, down with evictions.
func (c *Core) adapt(now time.Duration) {
	const rise = 0.01 // a second
	if !c.cfg.has(AIMD) {
		return
	}
	c.ceiling = min(c.cfg.SheddableCeiling, c.ceiling+rise*(now-c.raised).Seconds())
	c.raised = now
}

// lower is what an eviction does to the ceiling of sheddable work, every half second at most.
func (c *Core) lower(now time.Duration) {
	const (
		every = 500 * time.Millisecond
		depth = 0.25
		by    = 0.89
	)
	if !c.cfg.has(AIMD) || c.evicted && now-c.lowered < every {
		return
	}
	c.evicted, c.lowered = true, now
	c.ceiling = max(c.cfg.SheddableCeiling-depth, by*c.ceiling)
}

func (c *Core) dequeue(r *Request) {
	c.unhold(r)
	i, ok := slices.BinarySearchFunc(c.waiting, r, func(a, b *Request) int {
		if a == b {
			return 0
		}
		return before(a, b)
	})
	if ok {
		c.waiting = slices.Delete(c.waiting, i, i+1)
	}
}

func (c *Core) hold(now time.Duration, r *Request, e *endpoint) {
	r.held, r.heldSince = e, now
	e.holds++
	e.holdTokens += r.need
}

func (c *Core) unhold(r *Request) {
	if e := r.held; e != nil {
		r.held = nil
		e.holds--
		e.holdTokens -= r.need
	}
}
