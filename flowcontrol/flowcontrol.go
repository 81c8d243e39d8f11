// Package flowcontrol decides how many requests end, when, and for whom.
//
// One rule keeps callers safe: whoever evicts names who waits. No request ends unless one of
// strictly higher priority waits for exactly what it holds; where the evidence is doubtful,
// nobody ends. Nothing is evicted before [WithEvictionBelow] says who may be.
//
// There are two ways in. A [Pool] is the whole: priority admission to endpoints of finite
// capacity, which makes room by evicting what matters less.
//
//	pool := flowcontrol.NewPool(ev, flowcontrol.WithEvictionBelow(0))
//	pool.SetEndpoint(flowcontrol.Endpoint{Name: "10.0.0.7:8000", Capacity: 250_000})
//	go scrape(pool.Observe) // the endpoints' KV usage, every 50 ms or so
//
//	lease, err := pool.Admit(ctx, flowcontrol.Request{Priority: 1, Tokens: 1800}) // ctx of the ext_proc stream
//	if err != nil { ... }
//	forwardTo(lease.Endpoint())
//
// A [Reclaimer] is for a scheduler that has its own queue and saturation gauge, and only
// lacks the evictions.
//
// Both decide on facts they own, a ledger of what is in flight; a gauge is evidence with an
// age. Both credit what is already coming back before they end more, and stop where endings
// show no effect. Each decision is explained in a [Decision].
package flowcontrol

import (
	"errors"
	"fmt"
	"time"

	"github.com/extevict/extevict/internal/policy"
)

// ErrInfeasible is returned for a request that no endpoint could take if it were empty: it
// is too large for all where it may run, or there are none.
var ErrInfeasible = errors.New("flowcontrol: no endpoint can take the request")

// ErrOver is returned for a request that ended while it waited, by itself and without the end of
// its context.
var ErrOver = errors.New("flowcontrol: the request is over")

// An OverloadedError is returned for a request that matters too little to wait: as many as may
// wait do, and all matter more or came first.
type OverloadedError struct {
	RetryAfter time.Duration // 1 s to 30 s, jittered
}

func (e *OverloadedError) Error() string {
	return fmt.Sprintf("flowcontrol: too many requests wait, retry after %v", e.RetryAfter)
}

// An Endpoint is a model server of finite capacity.
type Endpoint struct {
	Name     string
	Capacity int64 // KV cache in tokens; 0 if samples will tell
	Slots    int   // most requests that it runs at once (vLLM's max_num_seqs); 0 is no bound
}

// A Sample is what an endpoint said of itself at a time.
type Sample struct {
	Used     int64 // KV cache in tokens; for vLLM its usage times its capacity
	Capacity int64 // KV cache in tokens; 0 is as it was
	At       time.Time
}

// A Request is what wants to be admitted. Take the priority from a source you trust.
type Request struct {
	ID, Key   string        // as in abort.Request: for logs and Aborters only
	Priority  int           // higher matters more
	Tokens    int64         // of the prompt; if you don't know, a quarter of its bytes is a fair guess
	TTFT      time.Duration // target for the first token, from now on; 0 is 500 ms
	Endpoints []string      // where it may run, by model, adapter, role or health; nil is anywhere
	Evictions int           // how often this work was evicted before: such a retry goes first among its priority
}

// An Option configures a Pool or a Reclaimer.
type Option func(*config)

type config struct {
	policy.Config
	observe func(Decision)
}

func configure(opts []Option) config {
	var c config
	for _, f := range opts {
		if f == nil {
			panic("flowcontrol: nil Option")
		}
		f(&c)
	}
	return c
}

// WithEvictionBelow lets requests of priorities below be evicted. They are the sheddable ones, which a
// Pool starts only while nothing else waits. Without this option nothing is evicted, and
// negative priorities are sheddable.
func WithEvictionBelow(priority int) Option {
	return func(c *config) { c.Evict, c.Sheddable = true, priority }
}

// WithSpareStarted spares requests whose first chunk has come, whatever waits.
func WithSpareStarted() Option { return func(c *config) { c.Unstarted = true } }

// WithDryRun evicts nobody and has the observer told who would have been.
func WithDryRun() Option { return func(c *config) { c.DryRun = true } }

// WithObserver has observe told each decision about who is evicted or why nobody is. It is
// called without locks, for one decision at a time in their order, from a goroutine of the
// Pool's or from Reclaim. If it is slower than decisions come for long, the oldest are dropped.
func WithObserver(observe func(Decision)) Option {
	if observe == nil {
		panic("flowcontrol: WithObserver: nil function")
	}
	return func(c *config) { c.observe = observe }
}

// WithCeilings sets how full a Pool makes an endpoint, as shares of its capacity above 0 and up to
// 1: for all requests, and at most when it starts a sheddable one. They are 0.97 and 0.90.
func WithCeilings(all, sheddable float64) Option {
	if !(all > 0 && all <= 1 && sheddable > 0 && sheddable <= all) {
		panic(fmt.Sprintf("flowcontrol: WithCeilings(%v, %v), want shares, the second not above the first", all, sheddable))
	}
	return func(c *config) { c.Ceiling, c.SheddableCeiling = all, sheddable }
}

// WithSteps says how a Pool's engines work: how many tokens a KV block has, and how many of prompts
// they compute in a step (vLLM's block_size and max_num_batched_tokens). They are 16 and 2048.
func WithSteps(block, prefill int) Option {
	if block < 1 || prefill < 1 {
		panic(fmt.Sprintf("flowcontrol: WithSteps(%d, %d)", block, prefill))
	}
	return func(c *config) { c.Block, c.Chunk = int64(block), int64(prefill) }
}

// WithMaxWaiting bounds how many requests wait in a Pool; it is 10,000. Beyond that those that
// matter least and came last get an OverloadedError.
func WithMaxWaiting(n int) Option {
	if n < 1 {
		panic(fmt.Sprintf("flowcontrol: WithMaxWaiting(%d)", n))
	}
	return func(c *config) { c.MaxWaiting = n }
}
