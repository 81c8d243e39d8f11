package abort

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// A Handle is one request in flight, for everybody who may watch or end it. A nil
// Handle, and one that no [New] made, is a request that is never aborted: every
// method is harmless on it. All methods are safe for concurrent use.
type Handle struct {
	ctx requestContext
	err atomic.Pointer[Error] // set once, under mu, by the abort that won

	mu      sync.Mutex // guards what follows; nests inside callers' locks, never around calls out
	outcome Outcome
	phase   Phase
	closed  bool
	unseen  bool          // see Owner.Unseen
	done    chan struct{} // made when first asked for; closed by Owner.Close
	hooks   []hook        // in the order they came; nil once settled
	inline  [2]hook       // room for an Owner's hook and one index, without allocating
	reqs    []Request     // never changed in place: Requests hands it out
	first   [1]Request    // room for the first description
	start   time.Time
	chunk   time.Time // of the first chunk
	chunks  int64
	bytes   int64
}

// An Owner is the authority over one request, for whoever serves it: only the Owner
// may say how the request goes and how it ended, short of an abort. All methods are
// safe for concurrent use.
type Owner struct {
	h Handle // a Handle is the Owner seen by others: one allocation
}

// A Settler is told how a request ended. Indexes of requests implement it; others
// use [Handle.OnSettle].
type Settler interface {
	// Settled is called once, without locks, by the goroutine that settles.
	Settled(Outcome)
}

type settlerFunc func(Outcome)

func (f settlerFunc) Settled(o Outcome) { f(o) }

type hook struct {
	key any
	s   Settler
}

type handleKey struct{}

// New returns the Owner of a request and a context, derived from parent, that
// carries its Handle. The context is done when the request is aborted (then its
// cause is an [*Error]), when the Owner closes it, or when parent is. The caller
// must call [Owner.Close] when the request is over.
//
// New panics if parent is nil.
func New(parent context.Context) (*Owner, context.Context) {
	if parent == nil {
		panic("abort: New: nil parent")
	}
	o := &Owner{}
	h := &o.h
	h.phase, h.start = Waiting, time.Now()
	h.ctx.parent, h.ctx.h = parent, h
	return o, &h.ctx
}

// FromContext returns the Handle of the request that ctx belongs to, the innermost
// one if there are several, or nil.
func FromContext(ctx context.Context) *Handle {
	h, _ := ctx.Value(handleKey{}).(*Handle)
	return h
}

// none reports whether h is nobody's request.
func (h *Handle) none() bool { return h == nil || h.ctx.parent == nil }

// Abort ends the request if nothing else has, and reports whether this call did.
// The decision and the end of the request's context are one step: when Abort returns,
// both have happened, whichever abort won. The winner's call has also run every hook
// and removed the request from every index; a loser does not wait for that, since it
// may be a hook itself. A client that had left by then wins: the request is no victim.
//
// Abort does not wait for the proxy or the engine; see [Handle.Done].
func (h *Handle) Abort(r Reason) bool { return h.AbortBefore(Unknown, r) }

// AbortBefore is Abort that wins only while the request's phase is known and
// earlier than p. It is exact: if AbortBefore(Streaming, r) wins, the client has
// not got a byte of the response. If p is [Unknown], any phase will do.
func (h *Handle) AbortBefore(p Phase, r Reason) bool {
	return !h.none() && h.settle(Aborted, &Error{Reason: r}, p)
}

// settle decides the outcome unless that is done, and reports whether it is oc.
// With before other than Unknown it decides only while the phase is known and
// earlier. cause is that of an abort, else nil.
func (h *Handle) settle(oc Outcome, cause *Error, before Phase) bool {
	h.mu.Lock()
	if h.outcome != Pending || before != Unknown && (h.phase == Unknown || h.phase >= before) {
		h.mu.Unlock()
		return false
	}
	got := oc
	switch {
	case h.ctx.parent.Err() != nil:
		got = Closed // the client left first; Outcome says so to whoever asked before us
	case cause != nil:
		// The parent may end at this very moment: whose cause the context took is the
		// order of the two, and nobody can see it differently.
		c := h.ctx.cancelable()
		c.cancel(cause)
		if context.Cause(c) == error(cause) {
			h.err.Store(cause)
		} else {
			got = Closed
		}
	}
	h.outcome = got
	var buf [len(h.inline)]hook // on the stack
	hooks := append(buf[:0], h.hooks...)
	h.hooks, h.inline = nil, [len(h.inline)]hook{} // whoever keeps the handle keeps no index alive
	h.mu.Unlock()
	run(hooks, got)
	return got == oc
}

// run calls every hook, also behind one that panics.
func run(hooks []hook, oc Outcome) {
	for i := range hooks {
		func() {
			ok := false
			defer func() {
				if !ok {
					run(hooks[i+1:], oc)
				}
			}()
			hooks[i].s.Settled(oc)
			ok = true
		}()
	}
}

// Describe says what the request is and what it holds: the first Request speaks for
// the whole, any others are further legs, one for each endpoint it occupies. It
// replaces what an earlier call said.
func (h *Handle) Describe(reqs ...Request) {
	if h.none() {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(reqs) == 1 && h.reqs == nil {
		h.first[0] = reqs[0]
		h.reqs = h.first[:]
	} else {
		// Not nil even if it is empty: first is written once, somebody may be reading it.
		h.reqs = append(make([]Request, 0, len(reqs)), reqs...)
	}
}

// Requests returns what Describe was told last. The caller must not change it.
func (h *Handle) Requests() []Request {
	if h.none() {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.reqs
}

// Outcome returns how the request ended, or Pending. A request whose context is
// done without an abort is Closed, also before its server has looked.
//
// In ext_proc configurations that never show the server the end of a response, a
// normal end is Closed, like a client that left.
func (h *Handle) Outcome() Outcome {
	if h.none() {
		return Pending
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.outcome == Pending && h.ctx.parent.Err() != nil {
		return Closed
	}
	return h.outcome
}

// Err returns the [*Error] of an aborted request, else nil.
func (h *Handle) Err() error {
	if h == nil {
		return nil
	}
	e := h.err.Load()
	if e == nil {
		if c := h.ctx.child.Load(); c != nil && c.Err() != nil {
			// An abort ends the context before it stores its error, both under mu. Whoever was
			// woken by the one must find the other.
			h.mu.Lock()
			e = h.err.Load()
			h.mu.Unlock()
		}
	}
	if e == nil {
		return nil // not a nil *Error
	}
	return e
}

// Done returns a channel that is closed when the request's Owner has let go of it:
// after an abort, when the proxy has hung up. That is not the moment at which the
// engine's capacity is free, and no proof that it ever will be.
func (h *Handle) Done() <-chan struct{} {
	if h.none() {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.done == nil {
		h.done = make(chan struct{})
		if h.closed {
			close(h.done)
		}
	}
	return h.done
}

// Progress returns how far the request has come.
func (h *Handle) Progress() Progress {
	if h.none() {
		return Progress{}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return Progress{Phase: h.phase, Start: h.start, FirstChunk: h.chunk, Chunks: h.chunks, Bytes: h.bytes, Unseen: h.unseen && h.chunks == 0}
}

// OnSettle has f called with the request's outcome, once: by the goroutine that
// settles it, in the order of the OnSettle calls, without locks; at once, by the
// caller, if it has settled. Every hook is called even if one panics; the panic
// goes on to whoever settled. f must not block.
func (h *Handle) OnSettle(f func(Outcome)) {
	if f == nil {
		panic("abort: OnSettle: nil function")
	}
	h.Attach(nil, settlerFunc(f))
}

// Attach is OnSettle for an index that keeps something of its own with each request
// and would otherwise need a map to find it again. If something is attached under
// key, Attach returns that and changes nothing; else it attaches s, has it told
// when the request settles (at once if it has), and returns nil. A nil key finds
// nothing and is never found. When the request settles, all is detached. Attach
// panics if s is nil.
func (h *Handle) Attach(key any, s Settler) Settler {
	if s == nil {
		panic("abort: Attach: nil Settler")
	}
	if h.none() {
		return nil
	}
	h.mu.Lock()
	if oc := h.outcome; oc != Pending {
		h.mu.Unlock()
		s.Settled(oc)
		return nil
	}
	defer h.mu.Unlock()
	if key != nil {
		for i := range h.hooks {
			if h.hooks[i].key == key {
				return h.hooks[i].s
			}
		}
	}
	if h.hooks == nil {
		h.hooks = h.inline[:0]
	}
	h.hooks = append(h.hooks, hook{key, s})
	return nil
}

// Handle returns the request's Handle.
func (o *Owner) Handle() *Handle { return &o.h }

// Advance moves the request to phase p unless it is there or further. Advancing to
// [Unknown] says that from now on nobody will tell when the response begins: it
// follows Waiting and comes before all others.
//
// Advance returns false if the request has been aborted: then the caller must not
// release anything to the client. Advance before you release, so that
// [Handle.AbortBefore] is exact.
func (o *Owner) Advance(p Phase) bool {
	h := &o.h
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.outcome == Aborted {
		return false
	}
	if p == Unknown && h.phase == Waiting || p > h.phase && p != Waiting {
		h.phase = p
	}
	return true
}

// Count adds to what [Handle.Progress] says of the response body.
func (o *Owner) Count(chunks, bytes int) {
	h := &o.h
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.chunks == 0 && chunks > 0 {
		h.chunk = time.Now()
	}
	h.chunks += int64(chunks)
	h.bytes += int64(bytes)
}

// Unseen says that the response body will pass without a call of Count, as far as the
// Owner knows, so that policies don't wait for its first chunk.
func (o *Owner) Unseen() {
	h := &o.h
	h.mu.Lock()
	defer h.mu.Unlock()
	h.unseen = true
}

// Settle says that the request ended by itself, [Completed] or [Closed], and reports
// whether that is its outcome by this call. It is false if the request had settled
// before, and for Completed if the client had left. It panics for other outcomes.
func (o *Owner) Settle(oc Outcome) bool {
	if oc != Completed && oc != Closed {
		panic("abort: Settle: outcome " + oc.String())
	}
	if o.h.none() {
		return false
	}
	return o.h.settle(oc, nil, Unknown)
}

// Close says that nothing more will happen to the request: it settles it Closed if
// it has not settled, ends its context and closes [Handle.Done]. Only the first
// call counts.
func (o *Owner) Close() {
	h := &o.h
	if h.none() {
		return
	}
	defer h.close() // also behind a hook that panics
	h.settle(Closed, nil, Unknown)
}

func (h *Handle) close() {
	h.mu.Lock()
	if !h.closed {
		h.closed = true
		if h.done != nil {
			close(h.done)
		}
	}
	h.mu.Unlock()
	h.ctx.end()
}
