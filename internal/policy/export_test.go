package policy

import (
	"fmt"
	"slices"
	"time"
)

// Check reports where the core's state contradicts itself.
func (c *Core) Check(now time.Duration) error {
	if !slices.IsSortedFunc(c.waiting, before) {
		return fmt.Errorf("waiting requests are out of order")
	}
	if c.budget.left < 0 || c.budget.left > budgetBurst*float64(len(c.endpoints)) {
		return fmt.Errorf("budget is %v with %d endpoints", c.budget.left, len(c.endpoints))
	}
	if c.ceiling <= 0 || c.ceiling > c.cfg.SheddableCeiling {
		return fmt.Errorf("ceiling of sheddable work is %v", c.ceiling)
	}
	holds := map[*endpoint][2]int64{}
	for _, r := range c.waiting {
		if r.state != Waiting {
			return fmt.Errorf("a request in state %d waits", r.state)
		}
		if r.held != nil {
			h := holds[r.held]
			holds[r.held] = [2]int64{h[0] + 1, h[1] + r.need}
			if r.held.gone || now-r.heldSince > holdFor {
				return fmt.Errorf("a hold of %v on %s, gone: %v", now-r.heldSince, r.held.name, r.held.gone)
			}
		}
	}
	for _, e := range c.endpoints {
		var l, backlog, started, reclaimStarted = Ledger{}, int64(0), int64(0), int64(0)
		unstarted := 0
		for i, r := range e.active {
			if r.state != Active || r.ep != e || r.at != i || r.held != nil {
				return fmt.Errorf("%s: active request in state %d at %d of %d", e.name, r.state, r.at, i)
			}
			l.Active++
			l.ActiveTokens += r.tokens
			if r.first {
				started += r.tokens
				continue
			}
			unstarted++
			backlog += r.Prompt
			if !slices.Contains(e.unstarted, r) {
				return fmt.Errorf("%s: an unstarted request is not among them", e.name)
			}
		}
		for _, r := range e.reclaiming {
			if r.state != Reclaiming || r.ep != e {
				return fmt.Errorf("%s: reclaiming request in state %d", e.name, r.state)
			}
			l.Reclaiming++
			l.ReclaimTokens += r.tokens
			if r.first {
				reclaimStarted += r.tokens
			}
		}
		l.Holds, l.HoldTokens = int(holds[e][0]), holds[e][1]
		if got := e.ledger(); got != l {
			return fmt.Errorf("%s: ledger is %+v, its requests make %+v", e.name, got, l)
		}
		if e.backlogTokens != backlog || e.startedTokens != started || e.reclaimStarted != reclaimStarted || len(e.unstarted) != unstarted {
			return fmt.Errorf("%s: backlog %d, started %d, reclaimed of those %d, unstarted %d; its requests make %d, %d, %d, %d",
				e.name, e.backlogTokens, e.startedTokens, e.reclaimStarted, len(e.unstarted), backlog, started, reclaimStarted, unstarted)
		}
		if !slices.IsSortedFunc(e.unstarted, func(a, b *Request) int { return int(a.dispatched - b.dispatched) }) {
			return fmt.Errorf("%s: unstarted requests are out of order", e.name)
		}
		if !(e.gamma >= 0.3 && e.gamma <= 1) || !(e.foreign >= 0) || !(e.mu() > 0) || !(e.backlog(now) >= 0) {
			return fmt.Errorf("%s: gamma %v, foreign %v, speed %v, backlog %v", e.name, e.gamma, e.foreign, e.mu(), e.backlog(now))
		}
	}
	return nil
}

// A Ledger is the sums of an endpoint.
type Ledger struct {
	Active, Reclaiming, Holds               int
	ActiveTokens, ReclaimTokens, HoldTokens int64
}

func (e *endpoint) ledger() Ledger {
	return Ledger{len(e.active), len(e.reclaiming), e.holds, e.activeTokens, e.reclaimTokens, e.holdTokens}
}

// Ledger returns the sums of an endpoint.
func (c *Core) Ledger(name string) Ledger {
	i, _ := c.find(name)
	return c.endpoints[i].ledger()
}

// Correction returns what samples taught of an endpoint.
func (c *Core) Correction(name string) (gamma, foreign float64) {
	i, _ := c.find(name)
	return c.endpoints[i].gamma, c.endpoints[i].foreign
}

// Held returns the endpoint where room is held for r, or "".
func (r *Request) Held() string {
	if r.held == nil {
		return ""
	}
	return r.held.name
}

// Generation tells apart endpoints of the same name.
func (r *Request) Generation() any { return r.ep }

// HoldFor, Recheck and WedgedAfter are constants of the algorithm.
const (
	HoldFor      = holdFor
	Recheck      = recheck
	WedgedAfter  = wedgedAfter
	BreakFor     = breakFor
	MaxEvictions = maxEvictions
	Reserve      = reserve
)

// An Item is a candidate of a cover.
type Item struct {
	Tokens, Cost float64
	Priority     int
}

// Cover returns which items are chosen to free tokens and slots for a priority.
func Cover(items []Item, tokens float64, slots, limit, priority int) ([]Item, bool) {
	c := New(Config{})
	e := &endpoint{pass: 1}
	c.pass = 1
	for i, it := range items {
		r := &Request{seq: uint64(i), state: Active, first: true, ep: e}
		e.cover.candidates = append(e.cover.candidates, candidate{r, it.Tokens, it.Cost, it.Cost / it.Tokens, it.Priority})
		e.cover.left += it.Tokens
		e.cover.largest = max(e.cover.largest, it.Tokens)
	}
	ok := c.choose(0, e, &Request{Priority: priority}, tokens, slots, limit)
	var chosen []Item
	for _, i := range e.cover.chosen {
		a := e.cover.candidates[i]
		chosen = append(chosen, Item{a.tokens, a.cost, a.priority})
	}
	return chosen, ok
}
