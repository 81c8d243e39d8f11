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
	"math"
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

	mu        sync.Mutex // guards what follows and every entry; never held across a call out, but a handle's lock nests inside
	all       set
	endpoints map[string]*set // by the integrator's name; a few may be empty
	idle      int             // how many of endpoints are empty
	seq       uint64          // of the latest dispatch
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
// the next call. It does not stop an eviction that has chosen the request. Tracking
// ends by itself when the request's handle settles. Without a handle in ctx (see
// [abort.FromContext]) TrackRequests does nothing.
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
	if e.dead {
		return
	}
	v.unlistLocked(e)
	v.seq++
	e.seq = v.seq
	// As the handle has it by now: calls for one request may cross, and the last of them
	// must not list what another described.
	if reqs = h.Requests(); len(reqs) > 0 {
		v.listLocked(e, reqs)
	}
}

// Evict ends requests as d asks and returns those that it ended. It returns without
// waiting for effects: see [abort.Handle.Done] for the end of the stream.
//
// A request whose Aborter fails is spared and tracked further, and the next one is
// tried; Evict returns the Aborters' errors joined, and panics of Aborters and of hooks
// as errors among them. A request that has ended, or whose client has left, is never a
// victim. If ctx is done, Evict evicts nobody else and its error has the context's
// cause; an Aborter that still runs then decides about its request alone when it
// returns.
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
		hs := make([]*abort.Handle, 0, v.all.n)
		for _, e := range v.all.order {
			hs = append(hs, e.h)
		}
		v.mu.Unlock()
		for _, h := range hs {
			if h.Outcome() == abort.Pending && !yield(h) {
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
	return v.all.n
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
				if d.Tokens -= tokensAt(h.Requests(), d.Endpoint); d.Tokens <= 0 {
					return
				}
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
			n = min(n, math.MaxInt64-r.Tokens) + r.Tokens // no overflow
		}
	}
	return n
}

// maxAborters bounds how many Aborters one Evict has at work at a time.
const maxAborters = 16

// verdict is what became of one claimed entry.
type verdict struct {
	e   *entry
	won bool
	err error
}

// end ends the requests of the claimed entries, as long as the demand is there.
func (x *eviction) end(es []*entry) {
	if x.v.aborter == nil {
		for i, e := range es {
			if x.ctx.Err() != nil {
				x.spared = append(x.spared, es[i:]...)
				return
			}
			var r verdict
			x.v.endOne(x.ctx, &x.d, e, &r)
			x.book(r)
		}
		return
	}
	// One goroutine for each Aborter's call: it ends when the Aborter returns. It shares
	// nothing with x, which it may outlive.
	v, ctx, d := x.v, x.ctx, x.d
	results := make(chan verdict, len(es))
	running := 0
	for len(es) > 0 || running > 0 {
		if len(es) > 0 && running < maxAborters && x.ctx.Err() == nil {
			e := es[0]
			es = es[1:]
			running++
			go func() {
				var r verdict
				defer func() { results <- r }() // also if the Aborter ends the goroutine
				v.endOne(ctx, &d, e, &r)
			}()
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

// abandon books what is there and leaves Aborters that outlive the demand to
// themselves. Its goroutine ends with the last of them.
func (x *eviction) abandon(results <-chan verdict, running int) {
	for ; running > 0; running-- {
		select {
		case r := <-results:
			x.book(r)
			continue
		default:
		}
		break
	}
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

// endOne ends one request for d, the Aborter first, and says in r what became of it. No
// panic of an Aborter or of somebody's hook gets past it: the other victims have nothing
// to do with it.
func (v *Evictor) endOne(ctx context.Context, d *Demand, e *entry, r *verdict) {
	r.e = e
	in := "" // whose code runs
	defer func() {
		if in == "" {
			return
		}
		p := recover()
		if p == nil {
			p = "runtime.Goexit"
		}
		r.err = fmt.Errorf("evictor: panic in %s: %v", in, p)
		r.won = in == "hook" && e.h.Err() != nil // whoever settles a request runs its hooks, nobody else
	}()
	if a := v.aborter; a != nil {
		// It must not hear of a request that is over or has come too far.
		if e.h.Outcome() != abort.Pending {
			v.bury(e) // its server has not noticed yet that the client left
			return
		}
		if !early(e.h.Progress().Phase, d.Before) {
			return
		}
		in = "Aborter"
		err := a.Abort(ctx, e.h, d.Reason)
		in = ""
		if err != nil {
			r.err = fmt.Errorf("evictor: %w", err)
			return
		}
	}
	in = "hook"
	r.won = e.h.AbortBefore(d.Before, d.Reason)
	in = ""
}
