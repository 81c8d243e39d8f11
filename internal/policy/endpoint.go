package policy

import (
	"math"
	"slices"
	"time"
)

// endpoint is the ledger of one model server, and what samples say of it.
type endpoint struct {
	cfg      *Config
	name     string
	capacity float64 // tokens
	slots    int
	gone     bool // removed

	active     []*Request // in no order
	unstarted  []*Request // of active: without a first token, in order of dispatch
	reclaiming []*Request // in order of issue
	holds      int
	holdTokens int64

	activeTokens    int64 // of active
	startedTokens   int64 // of active with a first token
	backlogTokens   int64 // prompts of unstarted
	reclaimTokens   int64 // of reclaiming
	reclaimStarted  int64 // of reclaiming with a first token
	lastFirst       time.Duration
	prefilled, took float64 // tokens and ms that the speed comes of, decayed

	observer
	breaker
	missed   int        // evictions that came to nothing, since the last pass
	unproven []*Request // evicted, streams ended, and samples have not shown the fall

	pass  uint64 // of the candidates
	cover cover
}

// mu is the prefill speed in tokens per ms.
func (e *endpoint) mu() float64 { return e.prefilled / e.took }

func newEndpoint(cfg *Config, name string) *endpoint {
	const speed, weight = 25.0, 100 // tokens per ms, an 8B model on one H100, as if seen for so many ms
	return &endpoint{cfg: cfg, name: name, observer: observer{gamma: 1}, prefilled: speed * weight, took: weight}
}

// learnSpeed books the first token of r, whose prefill followed the one before.
func (e *endpoint) learnSpeed(now time.Duration, r *Request) {
	const window = 65_536.0 // tokens
	gap := now - max(e.lastFirst, r.dispatched)
	e.prefilled += float64(r.Prompt)
	e.took += ms(gap)
	if e.prefilled > window {
		e.took *= window / e.prefilled
		e.prefilled = window
	}
	e.took = min(max(e.took, e.prefilled/1000), e.prefilled/0.1) // tokens per ms, whatever the first tokens say
}

// headProgress is how much of the first prompt in the engine's queue is done by now.
func (e *endpoint) headProgress(now time.Duration) float64 {
	if len(e.unstarted) == 0 {
		return 0
	}
	head := e.unstarted[0]
	return min(float64(head.Prompt), e.mu()*ms(now-max(e.lastFirst, head.dispatched)))
}

// backlog is the prefill that stands before a new request, in tokens.
func (e *endpoint) backlog(now time.Duration) float64 {
	return float64(e.backlogTokens) - e.headProgress(now)
}

// firmBacklog is the backlog that can't be recalled: that of requests that aren't sheddable.
func (e *endpoint) firmBacklog(now time.Duration) (n float64) {
	for i, r := range e.unstarted {
		if r.Priority >= e.cfg.Sheddable {
			if n += float64(r.Prompt); i == 0 {
				n -= e.headProgress(now)
			}
		}
	}
	return n
}

// occupancy is the tokens that the endpoint holds or is going to, less what is due back.
func (e *endpoint) occupancy() float64 {
	return e.gamma*float64(e.activeTokens+e.reclaimTokens) + e.foreign + float64(e.holdTokens)
}

// coming is the tokens, of those, and the slots that are expected back soon.
func (e *endpoint) coming() (tokens float64, slots int) {
	for _, r := range e.reclaiming {
		if r.hung && r.ended < 0 {
			continue // nobody's hope
		}
		tokens += e.gamma * float64(r.tokens)
		slots++
	}
	return tokens, slots
}

// free is the slots that are free, less those that are held.
func (e *endpoint) free() int {
	if e.slots == 0 {
		return math.MaxInt32
	}
	return e.slots - len(e.active) - len(e.reclaiming) - e.holds
}

func (e *endpoint) add(now time.Duration, r *Request) {
	r.state, r.ep, r.at, r.dispatched = Active, e, len(e.active), now
	r.tokens = blocks(r.Prompt+1, e.cfg.Block)
	e.active = append(e.active, r)
	e.unstarted = append(e.unstarted, r)
	e.activeTokens += r.tokens
	e.backlogTokens += r.Prompt
}

// count books the progress of an active request. A first token that was seen, not guessed,
// tells the speed.
func (e *endpoint) count(now time.Duration, r *Request, first, seen bool, generated int64) {
	if generated > r.generated {
		r.generated = generated
		t := blocks(r.Prompt+generated+1, e.cfg.Block)
		e.activeTokens += t - r.tokens
		if r.first {
			e.startedTokens += t - r.tokens
		}
		r.tokens = t
	}
	if first && !r.first {
		r.first = true
		if seen {
			e.learnSpeed(now, r)
		}
		e.lastFirst = now
		e.forget(r)
		e.startedTokens += r.tokens
	}
}

// forget takes r off the requests whose prefill is not done.
func (e *endpoint) forget(r *Request) {
	i := slices.Index(e.unstarted, r)
	e.unstarted = slices.Delete(e.unstarted, i, i+1)
	e.backlogTokens -= r.Prompt
}

// remove takes r off the active ones.
func (e *endpoint) remove(r *Request) {
	last := len(e.active) - 1
	e.active[r.at] = e.active[last]
	e.active[r.at].at = r.at
	e.active[last] = nil
	e.active = e.active[:last]
	e.activeTokens -= r.tokens
	if r.first {
		e.startedTokens -= r.tokens
	} else {
		e.forget(r)
	}
}

// reclaim books that r was ended: what it holds is expected back.
func (e *endpoint) reclaim(now time.Duration, r *Request) {
	e.remove(r)
	r.state, r.issued, r.ended, r.hung, r.wedged = Reclaiming, now, -1, false, false
	e.reclaiming = append(e.reclaiming, r)
	e.reclaimTokens += r.tokens
	if r.first {
		e.reclaimStarted += r.tokens
	}
}

// settle books that what r held is back.
func (e *endpoint) settle(r *Request) {
	i := slices.Index(e.reclaiming, r)
	e.reclaiming = slices.Delete(e.reclaiming, i, i+1)
	e.reclaimTokens -= r.tokens
	if r.first {
		e.reclaimStarted -= r.tokens
	}
	r.state = Done
}

// resume books that r was not ended after all.
func (e *endpoint) resume(r *Request) {
	e.settle(r)
	r.state, r.at = Active, len(e.active)
	e.active = append(e.active, r)
	e.activeTokens += r.tokens
	if r.first {
		e.startedTokens += r.tokens
		return
	}
	i, _ := slices.BinarySearchFunc(e.unstarted, r, func(a, b *Request) int {
		if a.dispatched != b.dispatched {
			return int(a.dispatched - b.dispatched)
		}
		return int(a.seq) - int(b.seq)
	})
	e.unstarted = slices.Insert(e.unstarted, i, r)
	e.backlogTokens += r.Prompt
}

// blocks is n tokens in whole blocks.
func blocks(n, block int64) int64 { return (n + block - 1) / block * block }

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func dur(ms float64) time.Duration {
	return time.Duration(min(ms*float64(time.Millisecond), math.MaxInt64/2))
}
