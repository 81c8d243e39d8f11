// Package evictor knows the requests in flight and ends those that matter least.
//
// One rule keeps callers safe: a [Demand] evicts only what lies strictly below a
// priority that the caller names, and the zero Demand evicts nothing.
//
//	ev := evictor.New()
//	ev.TrackRequests(ctx, abort.Request{Priority: -1, Endpoint: "10.0.0.7:8000"}) // in the ext_proc server
//	victims, err := ev.Evict(ctx, evictor.Demand{N: 1, Below: 0, Reason: abort.Preempted})
//
// A request is tracked from TrackRequests until its handle settles. Whether it
// holds capacity for longer the evictor does not know: Evict never waits for effects.
package evictor

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"

	"github.com/extevict/extevict/abort"
)

// A Demand asks for capacity. The zero Demand evicts nothing. A zero Below spares
// every request of priority 0 and up.
type Demand struct {
	// N is how many requests to evict at most.
	N int

	// Tokens, if positive, asks to free that many, and for as few victims as do: Evict
	// walks the requests in order until they free enough (by the sum of their Tokens,
	// those at Endpoint if one is named), spares those that turned out not to be
	// needed, and takes a single request instead if one of no higher priority
	// does it alone. If they can't free enough, or only with more than a positive N, it evicts
	// nobody.
	Tokens int64

	Below    int                      // only priorities strictly below; no order or filter can widen it
	Endpoint string                   // only requests with a leg there; "" anywhere
	Before   abort.Phase              // only requests in an earlier, known phase; Unknown is any
	Spare    func(*abort.Handle) bool // spares what it returns true for; called without locks
	DryRun   bool                     // choose and return, touch nothing
	Reason   abort.Reason             // what the requests are told
}

// A Victim is a candidate, as an order sees it.
type Victim struct {
	Handle   *abort.Handle
	Requests []abort.Request // what the handle describes: at least one; not to be changed
	Progress abort.Progress
}

// An Evictor knows the requests in flight. The zero Evictor is ready, as New makes
// it without options. All methods are safe for concurrent use.
type Evictor struct {
	aborter abort.Aborter
	order   func(a, b Victim) int

	mu        sync.Mutex // guards what follows and every entry; never held across a call out
	all       set
	endpoints map[string]*set // by the integrator's name; a few may be empty
	idle      int             // how many of endpoints are empty
	seq       uint64          // of the latest dispatch
	n         int             // entries that are listed or claimed
}

// An Option configures New.
type Option func(*Evictor)

// WithAborter has a called for each victim before its stream is ended; see
// [abort.Aborter]. Evict calls it for several victims at once, and waits until ctx
// is done at the latest.
func WithAborter(a abort.Aborter) Option {
	if a == nil {
		panic("evictor: WithAborter: nil Aborter")
	}
	return func(v *Evictor) { v.aborter = a }
}

// WithOrder sets which requests are evicted first, instead of those of the lowest
// priority, and among these the latest dispatched, which have the least work to lose:
// compare is negative if a goes before b. It is called without locks, on a snapshot of
// the requests below the Demand's priority, and must be a strict weak order.
func WithOrder(compare func(a, b Victim) int) Option {
	if compare == nil {
		panic("evictor: WithOrder: nil function")
	}
	return func(v *Evictor) { v.order = compare }
}

// New returns an Evictor that tracks nothing.
func New(opts ...Option) *Evictor {
	v := &Evictor{}
	for _, f := range opts {
		if f == nil {
			panic("evictor: nil Option")
		}
		f(v)
	}
	return v
}

// TrackRequests says what the request of ctx holds: one abort.Request for each
// endpoint that it occupies, the first of which speaks for the whole. A request that
// is disaggregated over a prefill and a decode endpoint is one victim, found from
// either.
//
// Again for the same request, it replaces what was said and counts as a new
// dispatch; with no Requests, the request holds nothing and is no candidate until
// the next call. Tracking ends by itself when the request's handle settles. Without a
// handle in ctx (see [abort.FromContext]) TrackRequests does nothing.
func (v *Evictor) TrackRequests(ctx context.Context, reqs ...abort.Request) {
	h := abort.FromContext(ctx)
	if h == nil {
		return
	}
	h.Describe(reqs...)
	e := &entry{v: v, h: h}
	// Attached before it is listed: if h settles in between, Settled marks e dead first.
	if old := h.Attach(v, e); old != nil {
		e = old.(*entry)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	switch e.state {
	case listed:
		v.unlistLocked(e)
		e.state = unlisted
		v.n--
	case claimed, dead:
		return // an eviction has it, and puts it back as described now; or nobody ever will
	}
	if len(reqs) > 0 {
		v.seq++
		e.seq = v.seq
		v.n++
		v.listLocked(e, reqs)
	}
}

// Evict ends requests as d asks and returns those that it ended. It returns without
// waiting for effects: see [abort.Handle.Done] for the end of the stream.
//
// A request whose Aborter fails is spared and tracked further, and the next one is
// tried; Evict returns the Aborters' errors joined. A request that has ended, or whose
// client has left, is never a victim. If ctx is done, Evict evicts nobody else and its
// error has the context's cause; an Aborter that still runs then decides about its
// request alone when it returns.
func (v *Evictor) Evict(ctx context.Context, d Demand) ([]*abort.Handle, error) {
	if d.N <= 0 && d.Tokens <= 0 {
		return nil, nil
	}
	x := eviction{v: v, ctx: ctx, d: d}
	defer x.putBack()
	if v.order == nil && d.Tokens <= 0 && d.Spare == nil && d.Before == abort.Unknown && !d.DryRun {
		x.newest()
	} else {
		x.planned()
	}
	return x.victims, errors.Join(x.errs...)
}

// All returns an iterator over the requests tracked when it starts that are still
// pending, in the default order of eviction.
func (v *Evictor) All() iter.Seq[*abort.Handle] {
	return func(yield func(*abort.Handle) bool) {
		v.mu.Lock()
		cs := v.all.appendBelow(make([]candidate, 0, v.all.n), nil)
		v.mu.Unlock()
		for _, c := range cs {
			if c.Handle.Outcome() == abort.Pending && !yield(c.Handle) {
				return
			}
		}
	}
}

// Len returns how many requests are tracked and may be chosen, or are being evicted.
// It may count some whose clients have left and whose servers have not noticed.
func (v *Evictor) Len() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.n
}

// eviction is one call of Evict.
type eviction struct {
	v       *Evictor
	ctx     context.Context
	d       Demand
	victims []*abort.Handle
	spared  []*entry // claimed, to be put back when the call ends, so that none is tried twice
	errs    []error
}

// batch bounds how many requests are claimed at a time, and with it how long the
// lock is held.
const batch = 256

// newest evicts in the default order, which the lists are in.
func (x *eviction) newest() {
	for len(x.victims) < x.d.N && x.live() {
		es := x.v.claimNewest(&x.d, min(x.d.N-len(x.victims), batch))
		if len(es) == 0 {
			return
		}
		x.end(es)
	}
}

// planned evicts what it chooses from a snapshot.
func (x *eviction) planned() {
	d := &x.d
	left := x.candidates()
	for x.live() {
		var chosen []candidate
		if d.Tokens > 0 {
			chosen, left = cover(left, d.Tokens, d.N)
		} else {
			n := min(d.N, len(left))
			chosen, left = left[:n], left[n:]
		}
		if len(chosen) == 0 {
			return
		}
		if d.DryRun {
			for _, c := range chosen {
				x.victims = append(x.victims, c.Handle)
			}
			return
		}
		// What fails is made up for from the rest, in the next round.
		won := len(x.victims)
		for len(chosen) > 0 {
			n := min(len(chosen), batch)
			x.end(x.v.claim(chosen[:n]))
			chosen = chosen[n:]
		}
		n := len(x.victims) - won
		if d.Tokens > 0 {
			for _, h := range x.victims[won:] {
				d.Tokens -= tokensAt(h.Requests(), d.Endpoint)
			}
			if d.Tokens <= 0 {
				return
			}
		}
		if d.N > 0 {
			if d.N -= n; d.N == 0 {
				return
			}
		}
	}
}

// live reports whether the demand is still there.
func (x *eviction) live() bool {
	if x.ctx.Err() == nil {
		return true
	}
	x.errs = append(x.errs, fmt.Errorf("evictor: %w", context.Cause(x.ctx)))
	return false
}

// candidates returns the requests that d allows, in order.
func (x *eviction) candidates() []candidate {
	cs := x.v.snapshot(&x.d)
	kept := cs[:0]
	for _, c := range cs {
		h := c.Handle
		c.Requests, c.Progress = h.Requests(), h.Progress()
		if h.Outcome() == abort.Pending && early(c.Progress.Phase, x.d.Before) && len(c.Requests) > 0 &&
			(x.d.Spare == nil || !x.d.Spare(h)) {
			c.tokens = tokensAt(c.Requests, x.d.Endpoint)
			kept = append(kept, c)
		}
	}
	if x.v.order != nil {
		sortCandidates(kept, x.v.order)
	}
	return kept
}

// early reports whether phase p is known and before limit, or any will do.
func early(p, limit abort.Phase) bool {
	return limit == abort.Unknown || p != abort.Unknown && p < limit
}

// tokensAt is what reqs hold at the endpoint, or anywhere.
func tokensAt(reqs []abort.Request, endpoint string) (n int64) {
	for i := range reqs {
		if r := &reqs[i]; r.Tokens > 0 && (endpoint == "" || r.Endpoint == endpoint) {
			n = min(n, maxTokens-r.Tokens) + r.Tokens // no overflow
		}
	}
	return n
}

const maxTokens = 1 << 62

// maxAborters bounds how many Aborters one Evict has at work at a time.
const maxAborters = 16

// verdict is what became of one claimed entry.
type verdict struct {
	e   *entry
	won bool
	err error
}

// end ends the requests of the claimed entries.
func (x *eviction) end(es []*entry) {
	if x.v.aborter == nil {
		for _, e := range es {
			x.book(x.endOne(e))
		}
		return
	}
	// One goroutine for each Aborter's call: it ends when the Aborter returns.
	results := make(chan verdict, len(es))
	running := 0
	for len(es) > 0 || running > 0 {
		if len(es) > 0 && running < maxAborters {
			e := es[0]
			es = es[1:]
			running++
			go func() { results <- x.endOne(e) }()
			continue
		}
		select {
		case r := <-results:
			running--
			x.book(r)
		case <-x.ctx.Done():
			x.spared = append(x.spared, es...)
			x.abandon(results, running)
			return
		}
	}
}

// abandon leaves Aborters that outlive the demand to themselves. Its goroutine ends
// with the last of them.
func (x *eviction) abandon(results <-chan verdict, running int) {
	v := x.v
	go func() {
		for range running {
			if r := <-results; !r.won {
				v.putBack(r.e)
			}
		}
	}()
}

func (x *eviction) book(r verdict) {
	if r.err != nil {
		x.errs = append(x.errs, r.err)
	}
	if r.won {
		x.victims = append(x.victims, r.e.h)
	} else {
		x.spared = append(x.spared, r.e)
	}
}

func (x *eviction) putBack() {
	for _, e := range x.spared {
		x.v.putBack(e)
	}
}

// endOne ends one request, the Aborter first. No panic of an Aborter or of somebody's
// hook gets past it: the other victims have nothing to do with it.
func (x *eviction) endOne(e *entry) (r verdict) {
	r.e = e
	defer func() {
		if p := recover(); p != nil {
			r.won = e.h.Err() != nil
			r.err = fmt.Errorf("evictor: panic: %v", p)
		}
	}()
	if e.h.Outcome() != abort.Pending || !early(e.h.Progress().Phase, x.d.Before) {
		return r // the Aborter must not hear of it
	}
	if a := x.v.aborter; a != nil {
		if err := a.Abort(x.ctx, e.h, x.d.Reason); err != nil {
			r.err = fmt.Errorf("evictor: %w", err)
			return r
		}
	}
	r.won = e.h.AbortBefore(x.d.Before, x.d.Reason)
	return r
}
