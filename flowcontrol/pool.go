package flowcontrol

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/internal/policy"
)

// A Pool admits requests to endpoints of finite capacity, those first that matter most, and
// makes room for them by evicting what matters less. All methods are safe for concurrent use.
//
// It has no goroutine while nothing happens, and needs no Close.
type Pool struct {
	ev      *evictor.Evictor
	observe func(Decision)
	spare   bool
	start   time.Time

	mu      sync.Mutex // guards what follows; never held across a call out, but a handle's lock nests inside
	core    *policy.Core
	counted time.Duration // when the progress of all requests was last looked at
	timer   *time.Timer   // the core's next step; the Pool's, nil before it was needed

	tellMu  sync.Mutex // guards what follows
	untold  []Decision // for the observer
	telling bool       // a goroutine tells them: it ends when there are none
}

// NewPool returns a Pool without endpoints that evicts through ev; see [WithEvictionBelow]. It panics
// if ev is nil or the options make no sense.
func NewPool(ev *evictor.Evictor, opts ...Option) *Pool {
	if ev == nil {
		panic("flowcontrol: NewPool: nil Evictor")
	}
	c := configure(opts)
	return &Pool{ev: ev, observe: c.observe, spare: c.Unstarted, start: time.Now(), core: policy.New(c.Config)}
}

// SetEndpoint adds an endpoint, or changes the capacity and slots of the one of that name. It
// panics if the name is empty; negative numbers are 0.
func (p *Pool) SetEndpoint(e Endpoint) {
	if e.Name == "" {
		panic("flowcontrol: SetEndpoint: no name")
	}
	p.do(func(now time.Duration) {
		p.core.SetEndpoint(now, policy.Endpoint{Name: e.Name, Capacity: e.Capacity, Slots: e.Slots})
	})
}

// RemoveEndpoint removes an endpoint. Requests that run there run on; none starts there, and
// those that may run nowhere else get ErrInfeasible. To end what runs there, see
// [evictor.Demand].Endpoint.
func (p *Pool) RemoveEndpoint(name string) {
	p.do(func(now time.Duration) { p.core.RemoveEndpoint(now, name) })
}

// Observe tells the Pool what an endpoint said of itself. A sample that can't be true is
// ignored: of an unknown endpoint, older than the last one, from the future, negative or far
// above capacity. Without samples for three of their usual periods, or when a gauge seems
// stuck, nobody is evicted there.
func (p *Pool) Observe(endpoint string, s Sample) {
	p.do(func(now time.Duration) {
		p.countLocked(now, true)
		p.core.Sample(now, endpoint, policy.Sample{Used: s.Used, Capacity: s.Capacity, At: now - time.Since(s.At)})
	})
}

// Admit waits until there is room for r on an endpoint, evicting what matters less if it may,
// and returns a lease of that room.
//
// If ctx belongs to a request (see [abort.FromContext]) the lease is tied to it: Admit tracks
// the request with the Evictor, follows its progress, and the lease ends when the request
// does. A request may hold several leases, such as one on an endpoint for prefill and one for
// decode; it must ask for them one after the other. Otherwise the caller calls Release, and
// the lease is never evicted.
//
// The error is ErrInfeasible, an *OverloadedError, ErrOver if the request has completed, or the
// cause of ctx's end.
func (p *Pool) Admit(ctx context.Context, r Request) (*Lease, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	h := abort.FromContext(ctx)
	l := &Lease{pool: p, ctx: ctx, req: r, handle: h, ready: make(chan struct{})}
	l.state = policy.Request{
		Priority: r.Priority, Prompt: r.Tokens, Target: r.TTFT, Endpoints: r.Endpoints, Evictions: r.Evictions,
		Fixed: h == nil, Tag: l,
	}
	var first *Lease
	if s, ok := h.Attach(p, (*settler)(l)).(*settler); ok {
		first = (*Lease)(s) // another leg of the same request
		h.Attach(nil, (*settler)(l))
	}
	p.do(func(now time.Duration) {
		if first != nil {
			p.core.Join(&first.state, &l.state)
		}
		if !l.answered { // the request may be over by now
			p.core.Offer(now, &l.state)
		}
	})
	select {
	case <-l.ready:
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		p.finish(l, false)
		return nil, context.Cause(ctx)
	}
	if l.err != nil { // ready: it is not written again
		return nil, l.err
	}
	if h != nil {
		l.leg = abort.Request{ID: r.ID, Key: r.Key, Priority: r.Priority, Tokens: r.Tokens, Endpoint: l.endpoint, Evictions: r.Evictions}
		p.ev.TrackRequests(ctx, append(slices.Clip(h.Requests()), l.leg)...)
	}
	return l, nil
}

// RetryAfter forecasts when a request that was refused or evicted should come again: 1 s to
// 30 s, in whole seconds, jittered. It is what an answer's Retry-After should say.
func (p *Pool) RetryAfter() time.Duration {
	p.mu.Lock()
	d := p.core.Delay(p.now())
	p.mu.Unlock()
	return retryAfter(d)
}

func retryAfter(d time.Duration) time.Duration {
	d = min(d, 30*time.Second)
	d += time.Duration(rand.Int64N(int64(d)/4 + int64(time.Second)))
	return min(max(d.Truncate(time.Second), time.Second), 30*time.Second)
}

// now is the time on the core's clock, which is never set back.
func (p *Pool) now() time.Duration { return time.Since(p.start) }

// do has the core learn something and decide, and carries that out.
func (p *Pool) do(learn func(now time.Duration)) {
	p.mu.Lock()
	now := p.now()
	learn(now)
	ds := p.stepLocked(now)
	p.mu.Unlock()
	for _, d := range ds {
		if len(d.Victims) > 0 && !d.DryRun {
			go p.evict(d) // ends when the Evictor has returned
		}
		if p.observe != nil {
			p.tell(public(d))
		}
	}
}

func (p *Pool) stepLocked(now time.Duration) []*policy.Decision {
	if p.core.Waiting() > 0 {
		p.countLocked(now, false)
	}
	st := p.core.Step(now)
	for _, r := range st.Dispatch {
		l := r.Tag.(*Lease)
		l.endpoint = r.Endpoint()
		l.answerLocked(nil)
	}
	for _, r := range st.Reject {
		l := r.Request.Tag.(*Lease)
		if r.Why == policy.WhyOverloaded {
			l.answerLocked(&OverloadedError{retryAfter(p.core.Delay(now))})
		} else {
			l.answerLocked(ErrInfeasible)
		}
	}
	if !st.Idle {
		if p.timer == nil {
			p.timer = time.AfterFunc(st.Next-now, func() { p.do(func(time.Duration) {}) })
		} else {
			p.timer.Reset(st.Next - now)
		}
	}
	if len(st.Decisions) == 0 {
		return nil
	}
	return slices.Clone(st.Decisions)
}

// countLocked looks at the progress of requests: of those without a first token each time, of
// the others every few milliseconds, or if all.
func (p *Pool) countLocked(now time.Duration, all bool) {
	const every = 5 * time.Millisecond
	count := func(r *policy.Request) bool {
		h := r.Tag.(*Lease).handle
		if h == nil {
			p.core.Guess(now, r, true)
			return true
		}
		if g := h.Progress(); g.Chunks > 0 {
			p.core.Count(now, r, true, g.Chunks)
		} else {
			p.core.Guess(now, r, g.Unseen) // an answer that is not streamed shows no chunk before its end either
		}
		return true
	}
	if all && now > p.counted || now-p.counted >= every {
		p.counted = now
		p.core.Active(count)
		return
	}
	p.core.Unstarted(count)
}

// evict ends the victims of d, and books what became of it.
func (p *Pool) evict(d *policy.Decision) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second) // for Aborters
	victims := make(map[*abort.Handle][]*policy.Request, len(d.Victims))
	for _, v := range d.Victims {
		h := v.Request.Tag.(*Lease).handle
		victims[h] = append(victims[h], v.Request)
	}
	demand := evictor.Demand{
		N: len(victims), Below: d.For.Priority, Endpoint: d.Endpoint, Reason: abort.Preempted,
		Spare: func(h *abort.Handle) bool { return victims[h] == nil },
	}
	if p.spare {
		demand.Before = abort.Streaming
	}
	ended, _ := p.ev.Evict(ctx, demand) // an Aborter that fails spares its request, which is what counts here
	cancel()
	for _, h := range ended {
		go p.await(h, victims[h]) // ends with the stream, or when the core gives that up
		delete(victims, h)
	}
	p.do(func(now time.Duration) {
		for _, rs := range victims {
			for _, r := range rs {
				p.core.Spared(now, r)
			}
		}
	})
}

// await books the end of an aborted request's stream, if it comes.
func (p *Pool) await(h *abort.Handle, rs []*policy.Request) {
	t := time.NewTimer(policy.Forgotten)
	defer t.Stop()
	select {
	case <-h.Done():
		p.do(func(now time.Duration) {
			for _, r := range rs {
				p.core.Ended(now, r)
			}
		})
	case <-t.C:
	}
}

// finish books that l no longer holds anything.
func (p *Pool) finish(l *Lease, complete bool) {
	p.do(func(now time.Duration) {
		if l.handle != nil {
			if g := l.handle.Progress(); g.Chunks > 0 {
				p.core.Count(now, &l.state, true, g.Chunks)
			}
		}
		p.core.Finish(now, &l.state, complete)
		l.answerLocked(ErrOver)
	})
}

// tell has the observer told d, behind what it was not told yet.
func (p *Pool) tell(d Decision) {
	const most = 1000
	p.tellMu.Lock()
	defer p.tellMu.Unlock()
	if len(p.untold) >= most {
		p.untold = slices.Delete(p.untold, 0, 1)
	}
	p.untold = append(p.untold, d)
	if !p.telling {
		p.telling = true
		go p.tellAll()
	}
}

func (p *Pool) tellAll() {
	for {
		p.tellMu.Lock()
		if len(p.untold) == 0 {
			p.telling, p.untold = false, nil
			p.tellMu.Unlock()
			return
		}
		d := p.untold[0]
		p.untold = p.untold[1:]
		p.tellMu.Unlock()
		func() {
			defer func() { _ = recover() }() // an observer's panic is not the Pool's
			p.observe(d)
		}()
	}
}
