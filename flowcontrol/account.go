package flowcontrol

import (
	"math"
	"slices"
	"time"

	"github.com/extevict/extevict/abort"
)

// A holding is what a tracked request holds. It hangs on the request's handle.
type holding struct {
	r      *Reclaimer
	h      *abort.Handle
	reqs   []abort.Request
	added  time.Time // when it was dispatched, at the earliest
	chosen time.Time // when it became a victim of ours
	spared time.Time // until when it is no victim, since it could not be ended

	left    time.Time // when it settled; zero before
	aborted bool
	ended   time.Time // when its stream was seen to have ended; zero before
}

// Settled implements abort.Settler.
func (x *holding) Settled(oc abort.Outcome) {
	r, now := x.r, time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	x.left, x.aborted = now, oc == abort.Aborted
	if !x.aborted {
		x.ended = now
	}
	r.leaving = append(r.leaving, x)
	if len(r.leaving) > 2*r.kept+64 {
		r.pruneLocked(now)
	}
}

// until is from when on no gauge shows x.
func (x *holding) until() time.Time {
	switch {
	case x.ended.IsZero():
		return x.left.Add(forgotten)
	case x.aborted:
		return x.ended.Add(patience)
	}
	return x.ended.Add(settling)
}

func (x *holding) hung(now time.Time) bool {
	return x.aborted && x.ended.IsZero() && now.Sub(x.left) > hungAfter
}

// at returns the tokens that x holds at the endpoint, 0 if they are unknown, and whether it
// holds anything there.
func (x *holding) at(endpoint string) (tokens int64, ok bool) {
	for i := range x.reqs {
		q := &x.reqs[i]
		if endpoint != "" && q.Endpoint != endpoint {
			continue
		}
		if q.Tokens <= 0 {
			return 0, true
		}
		tokens, ok = min(tokens, math.MaxInt64-q.Tokens)+q.Tokens, true
	}
	return tokens, ok
}

// pruneLocked learns which streams have ended, and forgets what no gauge shows any longer: one
// that is in use may be so old.
func (r *Reclaimer) pruneLocked(now time.Time) {
	oldest := now.Add(-3 * longPeriod)
	r.leaving = slices.DeleteFunc(r.leaving, func(x *holding) bool {
		if x.ended.IsZero() {
			select {
			case <-x.h.Done():
				x.ended = now
			default:
			}
		}
		return x.until().Before(oldest)
	})
	r.kept = len(r.leaving)
}

// look returns what the requests in flight hold.
func (r *Reclaimer) look() []*holding {
	now := time.Now()
	r.mu.Lock()
	before := r.looked
	r.mu.Unlock()
	var present []*holding
	var spare *holding
	for h := range r.ev.All() {
		if spare == nil {
			spare = new(holding)
		}
		*spare = holding{r: r, h: h, reqs: h.Requests(), added: h.Progress().Start}
		// Its stream may be much older than its dispatch.
		if before.After(spare.added) {
			spare.added = before
		}
		if old, ok := h.Attach(r, spare).(*holding); ok {
			present = append(present, old)
		} else {
			present = append(present, spare)
			spare = nil
		}
	}
	r.mu.Lock()
	if now.After(r.looked) {
		r.looked = now
	}
	r.pruneLocked(now)
	r.mu.Unlock()
	return present
}

// A scope is one gauge: an endpoint's or the pool's.
type scope struct {
	called   time.Time
	since    time.Time // work has been blocked
	last     Why       // what the observer was told
	sampled  time.Time
	period   time.Duration // usual, between samples; 0 before it is known
	tokens   bool          // what unit is in
	unit     float64       // tokens or requests for a saturation of 1; 0 before it is known
	measured time.Time     // when unit was
	budget   time.Duration // engine time, never negative
	filled   time.Time
	unproven []*trial // the oldest first
	failed   int      // trials in a row without effect
	open     time.Time
}

// A trial is a decision whose effect has not been seen.
type trial struct {
	at      time.Time
	unit    float64
	victims []*holding
	sizes   []float64 // what each frees
}

func (r *Reclaimer) scopeLocked(endpoint string, now time.Time) *scope {
	s := r.scopes[endpoint]
	if s == nil {
		if len(r.scopes) >= maxScopes {
			for name, s := range r.scopes {
				if now.Sub(s.called) > idleAfter && now.After(s.open) {
					delete(r.scopes, name)
				}
			}
		}
		s = &scope{called: now, since: now}
		r.scopes[endpoint] = s
	}
	if now.Sub(s.called) > patience {
		s.since = now
	}
	s.called = now
	return s
}

// fresh books the sample and reports whether it is evidence.
func (s *scope) fresh(p *Pressure, now time.Time) bool {
	finite := func(f float64) bool { return f >= 0 && f <= math.MaxFloat64 }
	age := now.Sub(p.Sampled)
	if !finite(p.Saturation) || !finite(p.Ceiling) || p.Ceiling == 0 || p.Saturation > absurd*p.Ceiling || p.Sampled.IsZero() || age < 0 {
		return false
	}
	if gap := p.Sampled.Sub(s.sampled); gap > 0 {
		if gap <= longPeriod {
			if s.period == 0 || gap < s.period {
				s.period = gap
			}
			s.period += (gap - s.period) / 8
		}
		s.sampled = p.Sampled
	}
	limit := staleFirst
	if s.period > 0 {
		limit = max(3*s.period, staleFloor)
	}
	return age <= limit
}

// An account is what the ledger says of a gauge's sample: in tokens, or in requests.
type account struct {
	tokens    bool
	unit      float64 // for a saturation of 1
	shown     float64 // by the gauge, when it was sampled
	held      float64 // now
	staying   float64 // of held, what does not come free by itself: all but the victims'
	coming    float64 // of shown, what victims still free
	endpoints int
}

// size is what x counts in the account of a gauge.
func (a *account) size(x *holding, endpoint string) float64 {
	tokens, ok := x.at(endpoint)
	switch {
	case !ok:
		return 0
	case a.tokens:
		return float64(tokens)
	}
	return 1
}

func (r *Reclaimer) accountLocked(s *scope, p *Pressure, waiting []Waiting, present []*holding, now time.Time) account {
	a := account{tokens: !slices.ContainsFunc(waiting, func(w Waiting) bool { return w.Tokens <= 0 })}
	names := make(map[string]struct{})
	for _, x := range present {
		if x.left.IsZero() {
			x.reqs = x.h.Requests()
		}
		if tokens, ok := x.at(p.Endpoint); ok {
			a.tokens = a.tokens && tokens > 0
		}
		for i := range x.reqs {
			names[x.reqs[i].Endpoint] = struct{}{}
		}
	}
	a.endpoints = max(1, len(names))
	if p.Endpoint != "" {
		a.endpoints = 1
	}
	for _, x := range r.leaving {
		if tokens, ok := x.at(p.Endpoint); ok && p.Sampled.Before(x.until()) {
			a.tokens = a.tokens && tokens > 0
		}
	}

	// What is leaving the gauge showed for sure before it was told to leave; from then on it may.
	type part struct{ shown, open, hung float64 }
	var sure, may part
	var mayStay float64 // of may: nothing but the gauge says whether it is free
	leave := func(x *holding, from time.Time) {
		n := a.size(x, p.Endpoint)
		if x.added.After(p.Sampled) {
			// The gauge has never shown it, so that it need not stop to.
			if x.ended.IsZero() {
				a.held += n
				if x.hung(now) {
					a.staying += n
				} else {
					a.coming += n
				}
			}
			return
		}
		g := &may
		if p.Sampled.Before(from) {
			g = &sure
		} else if x.ended.IsZero() || !p.Sampled.Before(x.ended) {
			mayStay += n
		}
		g.shown += n
		if x.ended.IsZero() {
			g.open += n
		}
		if x.hung(now) {
			g.hung += n
		}
	}
	for _, x := range present {
		switch n := a.size(x, p.Endpoint); {
		case !x.left.IsZero(): // among those that leave
		case !x.chosen.IsZero():
			leave(x, x.chosen)
		default:
			a.held += n
			a.staying += n
			if !x.added.After(p.Sampled) {
				sure.shown += n
			}
		}
	}
	stays := sure.shown
	for _, x := range r.leaving {
		if p.Sampled.Before(x.until()) {
			from := x.left
			if !x.chosen.IsZero() {
				from = x.chosen
			}
			leave(x, from)
		}
	}

	if s.tokens != a.tokens {
		s.tokens, s.unit, s.unproven = a.tokens, 0, nil
	}
	a.unit = s.unit
	if p.Saturation > 0 {
		switch {
		case may.shown == 0 && sure.shown > 0:
			a.unit = sure.shown / p.Saturation
			s.unit, s.measured = a.unit, now
		case s.unit == 0:
			a.unit = (sure.shown + may.shown) / p.Saturation
		case now.Sub(s.measured) > unitFor && sure.shown > 0:
			a.unit = (sure.shown + may.shown/2) / p.Saturation
			s.unit, s.measured = a.unit, now
		}
	}
	// Which, the gauge says itself.
	showing := min(max(p.Saturation*a.unit-sure.shown, 0), may.shown)
	a.shown = sure.shown + showing
	a.held += sure.open + min(mayStay, showing)
	hung := sure.hung + min(may.hung, showing)
	a.staying += hung
	a.coming += max(0, a.shown-stays-hung)
	return a
}

// estimate is what the gauge would say now.
func (a *account) estimate(saturation float64) float64 {
	if a.unit <= 0 {
		return saturation
	}
	return max(0, saturation+(a.held-a.shown)/a.unit)
}
