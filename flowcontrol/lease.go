package flowcontrol

import (
	"context"
	"slices"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/internal/policy"
)

// A Lease is room on an endpoint.
type Lease struct {
	pool   *Pool
	ctx    context.Context // of the request, for TrackRequests
	handle *abort.Handle   // nil if the caller releases
	req    Request
	leg    abort.Request
	state  policy.Request // the core's, guarded by pool.mu
	ready  chan struct{}  // closed when it is answered

	answered bool // guarded by pool.mu; the following don't change from then on
	endpoint string
	err      error
}

// answerLocked says what became of the request for the lease.
func (l *Lease) answerLocked(err error) {
	if !l.answered {
		l.answered, l.err = true, err
		close(l.ready)
	}
}

// Endpoint returns the name of the endpoint where the room is.
func (l *Lease) Endpoint() string { return l.endpoint }

// Release gives the room back: the work there is done. Of a lease that is tied to a request it
// need not be called, but may be, when a part of the request's work is done before the whole;
// the request is then no longer tracked there. Only the first call counts.
func (l *Lease) Release() {
	l.pool.finish(l, true)
	if l.handle == nil {
		return
	}
	legs := l.handle.Requests()
	if i := slices.Index(legs, l.leg); i >= 0 {
		l.pool.ev.TrackRequests(l.ctx, slices.Delete(slices.Clone(legs), i, i+1)...)
	}
}

// settler is a Lease whose request has settled.
type settler Lease

// Settled ends the lease. What completed holds nothing any more; what was ended by somebody, or
// left by its client, will.
func (s *settler) Settled(o abort.Outcome) {
	l := (*Lease)(s)
	if o == abort.Completed {
		l.pool.finish(l, true)
		return
	}
	l.pool.do(func(now time.Duration) {
		l.pool.core.Leave(now, &l.state)
		l.answerLocked(ErrOver)
	})
}
