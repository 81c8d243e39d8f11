package evictor_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
)

// serve begins a request as extproc.Wrap does, and tracks it as an ext_proc server does
// when it has picked an endpoint.
func serve(ev *evictor.Evictor, r abort.Request) *abort.Owner {
	own, ctx := abort.New(context.Background())
	ev.TrackRequests(ctx, r)
	return own
}

// Urgent work waits for an endpoint that is full: the request there that matters least
// gives way, and among equals the latest, which has the least work to lose.
func ExampleEvictor_Evict() {
	ev := evictor.New()
	for _, r := range []abort.Request{
		{ID: "batch-1", Priority: -1, Endpoint: "10.0.0.7:8000"},
		{ID: "batch-2", Priority: -1, Endpoint: "10.0.0.7:8000"},
		{ID: "batch-3", Priority: -1, Endpoint: "10.0.0.8:8000"},
		{ID: "chat", Priority: 0, Endpoint: "10.0.0.7:8000"},
	} {
		defer serve(ev, r).Close()
	}
	victims, err := ev.Evict(context.Background(), evictor.Demand{
		N:        1,
		Below:    0, // whatever matters less than the request that waits
		Endpoint: "10.0.0.7:8000",
		Reason:   abort.Preempted,
	})
	for _, h := range victims {
		fmt.Println(h.Requests()[0].ID, h.Outcome())
	}
	fmt.Println(err, ev.Len())
	// Output:
	// batch-2 aborted
	// <nil> 3
}

// A demand for KV-cache tokens ends as few requests as free them.
func ExampleEvictor_Evict_tokens() {
	ev := evictor.New()
	for _, r := range []abort.Request{
		{ID: "long", Priority: -1, Tokens: 8000},
		{ID: "mid", Priority: -1, Tokens: 2000},
		{ID: "short", Priority: -1, Tokens: 500},
	} {
		defer serve(ev, r).Close()
	}
	for _, tokens := range []int64{400, 1000, 9000, 50_000} {
		victims, _ := ev.Evict(context.Background(), evictor.Demand{Tokens: tokens, DryRun: true})
		fmt.Print(tokens, ":")
		for _, h := range victims {
			fmt.Print(" ", h.Requests()[0].ID)
		}
		fmt.Println()
	}
	// Output:
	// 400: short
	// 1000: mid
	// 9000: mid long
	// 50000:
}

// An Aborter tells the engine before the stream is ended. If it fails, its request is
// spared and another one is evicted.
func ExampleWithAborter() {
	engine := abort.AborterFunc(func(ctx context.Context, h *abort.Handle, r abort.Reason) error {
		key := h.Requests()[0].Key
		if key == "cmpl-2" {
			return errors.New("engine: no such request")
		}
		fmt.Println("engine: abort", key, "for", r)
		return nil
	})
	ev := evictor.New(evictor.WithAborter(engine))
	defer serve(ev, abort.Request{Priority: -1, Key: "cmpl-1"}).Close()
	defer serve(ev, abort.Request{Priority: -1, Key: "cmpl-2"}).Close()

	victims, err := ev.Evict(context.Background(), evictor.Demand{N: 1, Reason: abort.Overloaded})
	fmt.Println(len(victims), "evicted;", err)
	// Output:
	// engine: abort cmpl-1 for overloaded
	// 1 evicted; evictor: engine: no such request
}

// An order of one's own: those that have sent the fewest chunks first.
func ExampleWithOrder() {
	ev := evictor.New(evictor.WithOrder(func(a, b evictor.Victim) int {
		return cmp.Compare(a.Progress.Chunks, b.Progress.Chunks)
	}))
	far := serve(ev, abort.Request{ID: "far", Priority: -5})
	defer far.Close()
	near := serve(ev, abort.Request{ID: "near", Priority: -1})
	defer near.Close()
	far.Count(1000, 64_000)
	near.Count(3, 192)

	victims, _ := ev.Evict(context.Background(), evictor.Demand{N: 1, Reason: abort.Preempted})
	fmt.Println(victims[0].Requests()[0].ID)
	// Output: near
}

// The smallest use: an Evictor, a request that it tracks, and a Demand.
func ExampleNew() {
	ev := evictor.New()
	own, ctx := abort.New(context.Background()) // extproc.Wrap does this for each stream
	defer own.Close()
	ev.TrackRequests(ctx, abort.Request{ID: "batch-1", Priority: -1})

	victims, err := ev.Evict(context.Background(), evictor.Demand{N: 1, Reason: abort.Overloaded})
	fmt.Println(len(victims), err, context.Cause(ctx))
	// Output: 1 <nil> abort: request aborted: overloaded
}

// A request may occupy two endpoints, one for prefill and one for decode: it is one victim,
// found by either.
func ExampleEvictor_TrackRequests() {
	ev := evictor.New()
	own, ctx := abort.New(context.Background())
	defer own.Close()
	ev.TrackRequests(ctx,
		abort.Request{ID: "batch-1", Priority: -1, Endpoint: "prefill-0"},
		abort.Request{ID: "batch-1", Priority: -1, Endpoint: "decode-3"})

	victims, _ := ev.Evict(context.Background(), evictor.Demand{N: 1, Endpoint: "decode-3", Reason: abort.Preempted})
	fmt.Println(len(victims), "victim,", ev.Len(), "left")
	// Output: 1 victim, 0 left
}

// An endpoint is drained: all that runs there ends, except what is spared.
func ExampleEvictor_All() {
	ev := evictor.New()
	defer serve(ev, abort.Request{ID: "a", Endpoint: "gpu-0"}).Close()
	defer serve(ev, abort.Request{ID: "b", Endpoint: "gpu-1"}).Close()
	for h := range ev.All() {
		if h.Requests()[0].Endpoint == "gpu-0" {
			h.Abort(abort.Draining)
		}
	}
	for h := range ev.All() {
		fmt.Println(h.Requests()[0].ID)
	}
	// Output: b
}
